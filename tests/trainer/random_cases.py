"""Provides random small models of every family, random batches for them, and reference gradients.

`draw_cases` draws models and layouts. `reference_gradient` uses transformers and autograd in
float64, one sequence at a time.

Invariants
- A case is a pure function of the seed and its number.
- Every layout that a world of this size permits is drawn before any layout is drawn again.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_async.config.model import ParallelConfig, Recompute
from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture, ConfigReader
from megatron_async.models.families import families
from megatron_async.models.layout import check_layout
from megatron_async.trajectory.batch import TokenBatch
from tests.hf_models import tensors_of
from tests.worlds import legal_layouts

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "mixtral", "qwen3_moe")
EXPERT_FAMILIES = ("mixtral", "qwen3_moe")
_CLASSES = {
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3Config", "Qwen3ForCausalLM"),
    "gemma3_text": ("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM"),
    "mixtral": ("mixtral", "MixtralConfig", "MixtralForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}
_MAX_LAYERS, _KV_HEADS = 4, (1, 2, 4, 8)
# Two router logits that are closer than this may be ranked differently in float32.
_ROUTER_MARGIN = 1e-4


@dataclass(frozen=True)
class RandomCase:
    """One model at one layout; `model` contains the settings of its Hugging Face configuration."""

    number: int
    seed: int
    family: str
    model: Mapping[str, Any]
    parallel: ParallelConfig
    distributed_optimizer: bool
    recompute: Recompute
    microbatch_tokens: int
    temperature: float
    entropy_coef: float

    def __str__(self) -> str:
        p = self.parallel
        parts = [f"tp{p.tensor}", f"pp{p.pipeline}", f"dp{p.data}"]
        parts += [f"ep{p.expert}"] if self.family in EXPERT_FAMILIES else []
        parts += ["sp"] if p.sequence else []
        parts += ["tied"] if self.model["tie_word_embeddings"] else []
        parts += [] if self.distributed_optimizer else ["replicated-optimizer"]
        return f"{self.number}-{self.family}-{'-'.join(parts)}"


_RECOMPUTE: tuple[Recompute, ...] = ("all", "feed_forward", 1)


def draw_cases(count: int, ranks: int, seed: int) -> list[RandomCase]:
    """Draw `count` cases for a world of `ranks` ranks."""
    rng = random.Random(seed)
    layouts = {
        experts: _endless_samples(rng, _layouts(ranks, experts=experts))
        for experts in (False, True)
    }
    cases = []
    for number in range(count):
        family = FAMILIES[number % len(FAMILIES)]
        parallel = next(layouts[family in EXPERT_FAMILIES])
        cases.append(
            RandomCase(
                number=number,
                seed=rng.randrange(2**31),
                family=family,
                model=_model_that_fits(rng, family, parallel),
                parallel=parallel,
                distributed_optimizer=rng.random() < 0.7,
                recompute=_RECOMPUTE[number % 3] if rng.random() < 0.1 else "none",
                microbatch_tokens=rng.choice((16, 48, 1000)),
                temperature=rng.choice((1.0, 0.7, 1.3)),
                entropy_coef=rng.choice((0.0, 0.3)),
            )
        )
    return cases


def _endless_samples(rng: random.Random, layouts: list[ParallelConfig]) -> Iterator[ParallelConfig]:
    while True:
        yield from rng.sample(layouts, len(layouts))


def _layouts(ranks: int, *, experts: bool) -> list[ParallelConfig]:
    """Return every layout of `ranks` ranks that some model of this kind permits, within the numbers
    of layers and key/value heads that are drawn."""
    divisible = _architecture(_EXPERTS_EVERYWHERE if experts else _DENSE_EVERYWHERE)
    return [
        parallel
        for parallel in legal_layouts(divisible, ranks)
        if parallel.ranks == ranks
        and parallel.pipeline <= _MAX_LAYERS
        and max(_KV_HEADS) % parallel.tensor == 0
    ]


# Every count is divisible by 2, 3, 4, 5, 7 and 8, so that a layout that fails here fails for all
# models.
_DENSE_EVERYWHERE: Mapping[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 1680,
    "hidden_size": 64,
    "intermediate_size": 1680,
    "num_attention_heads": 1680,
    "num_key_value_heads": 1680,
    "head_dim": 8,
    "vocab_size": 16800,
}
_EXPERTS_EVERYWHERE: Mapping[str, Any] = {
    **_DENSE_EVERYWHERE,
    "model_type": "qwen3_moe",
    "num_experts": 1680,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    family = families()[str(raw["model_type"])]
    return family.architecture(ConfigReader(raw, family.model_type))


def _model_that_fits(
    rng: random.Random, family: str, parallel: ParallelConfig
) -> Mapping[str, Any]:
    """Draw model settings until `check_layout` accepts them, and return them."""
    for _ in range(10_000):
        settings = _draw_model(rng, family)
        try:
            check_layout(_architecture({"model_type": family, **settings}), parallel)
        except UserError:
            continue
        return settings
    raise AssertionError(f"no drawn {family} model fits {parallel}")


def _draw_model(rng: random.Random, family: str) -> dict[str, Any]:
    kv_heads = rng.choice(_KV_HEADS)
    heads = kv_heads * rng.choice((1, 2, 3))
    head_dim = rng.choice((4, 6, 8))
    settings: dict[str, Any] = {
        "vocab_size": rng.randrange(67, 151),
        # Some families require a multiple of the number of heads.
        "hidden_size": heads * (-(-12 // heads) + rng.randint(0, 2)),
        "intermediate_size": rng.randrange(16, 65),
        "num_hidden_layers": rng.randint(1, _MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "initializer_range": rng.choice((0.1, 0.2)),
        "pad_token_id": None,  # transformers would not train the padding token's embedding.
        "rope_parameters": _draw_rope(rng, family),
    }
    if family == "qwen2":  # Qwen2 derives its head dimension from the hidden size.
        settings["hidden_size"] = heads * head_dim
    else:
        settings["head_dim"] = head_dim
    return {**settings, **_FAMILY_SETTINGS.get(family, _no_settings)(rng, settings)}


def _draw_rope(rng: random.Random, family: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rng.choice((1e3, 1e4, 1e6))}
    if family == "llama":
        scaling = {
            "default": {},
            "linear": {"factor": 3.5},
            "llama3": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 48,
            },
        }
        kind = rng.choice(sorted(scaling))
        rope |= {"rope_type": kind, **scaling[kind]}
    return rope


def _no_settings(_rng: random.Random, _settings: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _gemma3(rng: random.Random, settings: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    return {
        "layer_types": [rng.choice(kinds) for _ in range(settings["num_hidden_layers"])],
        "sliding_window": rng.randint(2, 12),
        "query_pre_attn_scalar": rng.choice((5, 12)),
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }


def _mixtral(rng: random.Random, _settings: Mapping[str, Any]) -> dict[str, Any]:
    # A single chosen expert always has weight 1, so the router would have no gradient to compare.
    num = rng.choice((2, 4, 6, 8))
    return {
        "num_local_experts": num,
        "num_experts_per_tok": rng.randint(2, min(4, num)),
        "sliding_window": None,
    }


def _qwen3_moe(rng: random.Random, _settings: Mapping[str, Any]) -> dict[str, Any]:
    num = rng.choice((2, 4, 6, 8))
    normalized = rng.random() < 0.5
    return {
        "num_experts": num,
        "num_experts_per_tok": rng.randint(2 if normalized else 1, min(4, num)),
        "norm_topk_prob": normalized,
        "moe_intermediate_size": rng.randrange(8, 33),
    }


_FAMILY_SETTINGS: Mapping[str, Callable[[random.Random, Mapping[str, Any]], dict[str, Any]]] = {
    "gemma3_text": _gemma3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}


def _hf_config(family: str, settings: Mapping[str, Any]) -> Any:
    folder, config_class, _ = _CLASSES[family]
    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    return getattr(module, config_class)(**settings)


def build_model(case: RandomCase) -> Any:
    """Return the transformers model in float32, with random norms and biases."""
    folder, _, model_class = _CLASSES[case.family]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    torch.manual_seed(case.seed)
    model = getattr(module, model_class)(_hf_config(case.family, case.model)).eval()
    if case.family in EXPERT_FAMILIES:
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def random_batch(case: RandomCase, attempt: int = 0) -> TokenBatch:
    """Return a batch of ragged groups with very unequal lengths, masked tokens inside responses,
    and one sequence without trained tokens."""
    rng = np.random.default_rng((case.seed, attempt))
    groups, group_size = 3, 2
    count = groups * group_size
    lengths_S = rng.choice((2, 3, 5, 9, 17, 33), count)
    cu_S1 = np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32)
    total = int(cu_S1[-1])
    prompt_S = np.minimum(rng.integers(1, 6, count), lengths_S - 1)
    position_T = np.arange(total) - np.repeat(cu_S1[:-1], lengths_S)
    mask_T = (position_T >= np.repeat(prompt_S, lengths_S)) & (rng.random(total) > 0.15)
    mask_T &= np.repeat(np.arange(count) != rng.integers(count), lengths_S)
    mask_T[cu_S1[1:] - 1] |= not mask_T.any()
    zeros_T = np.zeros(total, np.int32)
    return TokenBatch(
        step=0,
        token_ids_T=rng.integers(0, case.model["vocab_size"], total).astype(np.int32),
        loss_mask_T=mask_T.astype(np.float32),
        rollout_logprobs_T=np.where(mask_T, rng.normal(-4.0, 0.3, total), 0).astype(np.float32),
        version_T=np.where(mask_T, 0, -1).astype(np.int32),
        lag_T=zeros_T,
        cu_seqlens_S1=cu_S1,
        rewards_S=rng.random(count).astype(np.float32),
        group_ids_S=np.repeat(np.arange(groups), group_size).astype(np.int64),
        trajectory_ids_S=np.arange(count, dtype=np.int64),
        prompt_lengths_S=prompt_S.astype(np.int32),
        truncated_S=np.zeros(count, np.bool_),
        resumed_S=np.zeros(count, np.bool_),
        temperature=case.temperature,
    )


@dataclass(frozen=True, eq=False)
class Reference:
    """A batch with its loss and gradient in float64; weights and gradient have the names of the
    published checkpoint."""

    batch: TokenBatch
    loss: float
    weights: Mapping[str, Tensor]
    gradient: Mapping[str, Tensor]


class _Float64(TorchFunctionMode):
    """Replaces float32 by float64 where transformers converts to float32 (norms, softmax, rope)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return func(*args, **named)


def reference_gradient(case: RandomCase, folder: Path) -> Reference:
    """Write the model to `folder`, and return a batch with its loss and gradient from autograd in
    float64.

    The loss is that of recipe `pg` with an entropy bonus: the mean over all trained tokens of -(R -
    mean R) log pi - c H. A batch that has a token with nearly tied experts is drawn again, because
    there the gradient is not continuous, and float32 may choose another expert.
    """
    model = build_model(case)
    model.save_pretrained(folder / "model")
    model = model.double()
    for attempt in range(100):
        batch = random_batch(case, attempt)
        with _Float64():
            loss, margin = _loss(model, case, batch)
            if margin > _ROUTER_MARGIN:
                loss.backward()
                break
    else:
        raise AssertionError(f"{case}: every batch has a near tie between experts")
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    model.save_pretrained(folder / "gradient")  # With names and layouts of the published format.
    return Reference(
        batch, float(loss.detach()), tensors_of(folder / "model"), tensors_of(folder / "gradient")
    )


def _loss(model: Any, case: RandomCase, batch: TokenBatch) -> tuple[Tensor, float]:
    """Return the loss, and the smallest distance between the logits of a chosen and an unchosen
    expert."""
    total = torch.zeros((), dtype=torch.float64)
    margin = float("inf")
    rewards_S = torch.from_numpy(batch.rewards_S).double()
    advantages_S = rewards_S - rewards_S.mean()
    experts = case.family in EXPERT_FAMILIES
    for index, (start, stop) in enumerate(pairwise(batch.cu_seqlens_S1.tolist())):
        ids_L = torch.from_numpy(batch.token_ids_T[start:stop]).long()
        mask_L = torch.from_numpy(batch.loss_mask_T[start + 1 : stop]).double()
        options = {"output_router_logits": True} if experts else {}
        output = model(ids_L[None], use_cache=False, **options)
        logprobs_LV = (output.logits[0, :-1] / case.temperature).log_softmax(-1)
        chosen_L = logprobs_LV.gather(1, ids_L[1:, None])[:, 0]
        entropy_L = -(logprobs_LV.exp() * logprobs_LV).sum(-1)
        terms_L = advantages_S[index] * chosen_L + case.entropy_coef * entropy_L
        total = total - (mask_L * terms_L).sum()
        if experts:
            margin = min(margin, _router_margin(output.router_logits, model.config))
    return total / float(batch.loss_mask_T.sum()), margin


def _router_margin(router_logits: tuple[Tensor, ...], config: Any) -> float:
    ranked_TE = torch.cat([layer.detach() for layer in router_logits]).sort(descending=True).values
    top = config.num_experts_per_tok
    if top == ranked_TE.shape[1]:
        return float("inf")
    return float((ranked_TE[:, top - 1] - ranked_TE[:, top]).min())

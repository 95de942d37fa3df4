"""Tests that the Megatron model equals the Hugging Face model: log-probs at every layout, and
weights bit for bit.

In bfloat16, the precision of GPU runs, every family runs forward and backward and stays close to
float32. This test uses the GPU if there is one, and otherwise the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.config.model import ModelConfig, ParallelConfig, Recompute, TrainerConfig
from tests.distributed import run_ranks
from tests.hf_models import (
    CASES,
    EXPERT_CASES,
    OWN_CASES,
    random_stream,
    reference_logprobs,
    save_hf_model,
    tensors_of,
)

RANKS = 4
MODELS = {**CASES, **EXPERT_CASES, **OWN_CASES}
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_family" / "mistral.py"
FAMILIES = {"mistral": f"{EXAMPLE}:FAMILY"}
TEMPERATURE = 0.7
# Ragged lengths: single tokens, a length that no tensor size divides, and a long sequence.
LENGTHS = (5, 17, 1, 9, 40, 1, 2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor": 2},
    "tp2_sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_pp2_sp": {"tensor": 2, "pipeline": 2, "sequence": True},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep1": {},
    "ep4": {"expert": 4},
    "tp2_sp_ep2": {"tensor": 2, "sequence": True, "expert": 2},
    "pp2_ep2": {"pipeline": 2, "expert": 2},
    "tp2_pp2_sp_ep2": {"tensor": 2, "pipeline": 2, "sequence": True, "expert": 2},
}
ALL_LAYOUTS = {**LAYOUTS, **EXPERT_LAYOUTS}
POINTS = [(case, layout) for case in CASES for layout in LAYOUTS]
POINTS += [(case, layout) for case in EXPERT_CASES for layout in EXPERT_LAYOUTS]
POINTS += [(case, "tp2_pp2_sp") for case in OWN_CASES]


@dataclass(frozen=True)
class Checked:
    """Results of one model at one layout on one rank; log-probs and entropy are None except on the
    last stage."""

    logprobs_R: torch.Tensor | None
    entropy_R: torch.Tensor | None


def check_layouts(
    models: dict[str, str],
    points: list[tuple[str, str]],
    mask_T: torch.Tensor,
    export_to: str,
    experts: str = "auto",
) -> dict[tuple[str, str], Checked]:
    """Run in each rank: run the models at their layouts forward, export them, and return the
    results."""
    from megatron_async.models.load import load_hf_weights
    from megatron_async.models.save import save_hf
    from megatron_async.trainer.device import device_adapter
    from megatron_async.trainer.packed import pack_inputs
    from megatron_async.trainer.parallel import destroy_parallel, init_parallel
    from megatron_async.trainer.policy_model import build_policy

    trainer = TrainerConfig(collective_timeout_seconds=60, logprob_chunk_tokens=7)
    ids_T, cu_S1 = random_stream(LENGTHS)
    packed = pack_inputs(ids_T, cu_S1, mask_T)
    results = {}
    with device_adapter():
        for layout_name in dict.fromkeys(at for _, at in points):
            layout = ALL_LAYOUTS[layout_name]
            parallel = ParallelConfig(ranks=RANKS, **layout)
            init_parallel(parallel, trainer, seed=1)
            for name in (case for case, at in points if at == layout_name):
                path = models[name]
                model = ModelConfig(
                    path=path, dtype="float32", family=FAMILIES.get(name, ""), experts=experts
                )
                chunks = build_policy(model, parallel, trainer=trainer, seed=1)
                load_hf_weights(chunks, path)
                results[name, layout_name] = _forward(chunks, packed)
                save_hf(chunks, f"{export_to}/{name}-{layout_name}", path, max_shard_bytes=30_000)
        destroy_parallel()
    return results


def _forward(chunks: list[Any], packed: Any) -> Checked:
    """Run a forward pass through Megatron's pipeline schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_async.trainer.packed import TokenLogprobs

    def step(iterator: Any, model: Any) -> Any:
        output = model(next(iterator), temperature=TEMPERATURE, return_entropy=True)
        return output, lambda out, non_loss_data=True: out

    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([packed]),
        model=chunks,
        num_microbatches=1,
        seq_length=packed.num_tokens,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not outputs:
        return Checked(None, None)
    assert isinstance(outputs[0], TokenLogprobs)
    assert outputs[0].entropy_R is not None
    return Checked(outputs[0].logprobs_R.detach(), outputs[0].entropy_R.detach())


@pytest.fixture(scope="module")
def response_mask() -> torch.Tensor:
    return mask_of_responses()


def mask_of_responses() -> torch.Tensor:
    """Return a mask of about half of the tokens, never of the first token of a sequence."""
    ids_T, cu_S1 = random_stream(LENGTHS)
    mask_T = torch.rand(ids_T.shape[0], generator=torch.Generator().manual_seed(3)) < 0.5
    mask_T[cu_S1[:-1].long()] = False
    return mask_T


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("models")
    return {name: (root / name, save_hf_model(name, root / name)) for name in MODELS}


@pytest.fixture(scope="module")
def reference(
    models: dict[str, tuple[Path, Any]], response_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return transformers' log-probs of the response tokens by model."""
    ids_T, cu_S1 = random_stream(LENGTHS)
    return {
        case: reference_logprobs(model, ids_T, cu_S1, TEMPERATURE)[response_mask]
        for case, (_, model) in models.items()
    }


@pytest.fixture(scope="module")
def export_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def results(
    models: dict[str, tuple[Path, Any]], response_mask: torch.Tensor, export_root: Path
) -> list[dict[tuple[str, str], Checked]]:
    paths = {name: str(path) for name, (path, _) in models.items()}
    return run_ranks(
        check_layouts, RANKS, paths, POINTS, response_mask, str(export_root), timeout_seconds=150
    )


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layout"), POINTS)
def test_model_logprobs_equal_transformers_at_every_layout(
    case: str,
    layout: str,
    reference: dict[str, torch.Tensor],
    results: list[dict[tuple[str, str], Checked]],
) -> None:
    expected_R = reference[case]
    assert expected_R.std() > 1, "log-probs must vary, otherwise agreement has no meaning"
    last_stage = [found for rank in results if (found := rank[case, layout]).logprobs_R is not None]
    assert len(last_stage) == RANKS // ALL_LAYOUTS[layout].get("pipeline", 1)
    for found in last_stage:
        assert (found.logprobs_R - expected_R).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layout"), POINTS)
def test_exported_weights_equal_the_original_bit_for_bit(
    case: str,
    layout: str,
    models: dict[str, tuple[Path, Any]],
    export_root: Path,
    results: list[dict[tuple[str, str], Checked]],
) -> None:
    exported = tensors_of(export_root / f"{case}-{layout}")
    original = tensors_of(models[case][0])
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert tensor.dtype == exported[name].dtype
        assert torch.equal(tensor, exported[name]), name


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    """Make this process its own process group, and return its device."""
    from megatron_async.trainer.parallel import parallel_session

    with parallel_session(ParallelConfig(), TrainerConfig(), seed=0) as layout:
        yield layout.device


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize(
    ("case", "recompute"),
    [(case, "none") for case in (*CASES, *EXPERT_CASES)]
    + [("qwen3", "all"), ("gemma3", "all"), ("qwen3_moe", "all")],
)
def test_bfloat16_model_is_close_to_float32_and_has_finite_gradients(
    case: str, recompute: Recompute, device: torch.device, tmp_path: Path
) -> None:
    from megatron_async.models.load import load_hf_weights
    from megatron_async.trainer.packed import TokenLogprobs, pack_inputs
    from megatron_async.trainer.policy_model import build_policy

    model = save_hf_model(case, tmp_path, initializer_range=0.05)
    ids_T, cu_S1 = random_stream((9, 30, 1, 17))
    mask_T = torch.ones_like(ids_T)
    mask_T[cu_S1[:-1].long()] = 0
    (policy,) = build_policy(
        ModelConfig(path=str(tmp_path), dtype="bfloat16"),
        ParallelConfig(),
        trainer=TrainerConfig(recompute=recompute),
        seed=0,
    )
    load_hf_weights([policy], tmp_path)
    policy.train()
    packed = pack_inputs(*(stream.to(device) for stream in (ids_T, cu_S1, mask_T)))
    output = policy(packed, return_entropy=True)
    assert isinstance(output, TokenLogprobs)
    assert output.logprobs_R.dtype is torch.float32
    expected_R = reference_logprobs(model, ids_T, cu_S1, 1.0)[mask_T.bool()]
    # bfloat16 has eight significant bits, an error of about 1 % of a log-prob of 5 nats.
    assert (output.logprobs_R.cpu() - expected_R).abs().mean() < 0.05
    output.logprobs_R.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.dtype is torch.bfloat16, name
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name

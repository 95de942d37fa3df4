"""Runs Megatron's layers for Transformer Engine over stand-ins of its modules that compute on a
CPU.

    python -m tests.trainer.fake_transformer_engine FOLDER

Transformer Engine has no build without CUDA. The stand-ins of its modules have the signatures of
constructors and calls of release 2.11 (tests/data/transformer_engine.json), its parameter names,
and the attributes that it sets on parameters. They compute what its documentation describes. Layer
specs and wrappers are Megatron's own. The stand-ins must be installed before Megatron is imported,
so this module needs a separate process.

The command runs the models in FOLDER at their layouts in ranks and writes the results to
`FOLDER/found.pickle`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

SIGNATURES: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[1] / "data" / "transformer_engine.json").read_text()
)
# Names that Megatron imports if they exist, but that release 2.11 does not have.
ABSENT = {
    ("transformer_engine.pytorch.module.base", "get_workspace"),
    ("transformer_engine.pytorch.attention", "_SplitAlongDim"),
    ("transformer_engine.pytorch", "ep"),
    ("transformer_engine.pytorch.ops.basic", "grouped_linear"),
    ("transformer_engine.pytorch.optimizers", "multi_tensor_scale_tensor"),
    ("transformer_engine.pytorch.permutation", "moe_permute_and_pad_with_probs"),
    ("transformer_engine.pytorch.tensor", "grouped_tensor"),
}


def check_call(function: str, *positional: Any, **named: Any) -> dict[str, Any]:
    """Bind a call to the signature of release 2.11 and return the arguments by name."""
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in SIGNATURES[function]]
    return inspect.Signature(parameters).bind_partial(*positional, **named).arguments


class _Module(torch.nn.Module):
    """Base class of the stand-ins, which accepts only the arguments of the Transformer Engine
    module named in `_of`."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        check_call(type(self)._of, **given)
        self.given = given
        self.tp_group = given.get("tp_group")
        self.tp_size = given.get("tp_size", 1) if self.tp_group is None else self.tp_group.size()
        self.sequence_parallel = self.tp_size > 1 and bool(given.get("sequence_parallel"))
        self.parallel_mode = given.get("parallel_mode")

    _of = ""

    def add(self, name: str, *shape: int, split: int | None = None, **marks: Any) -> None:
        """Register a parameter; `split` is the axis along which tensor ranks shard it, or None for
        a parameter that is not sharded."""
        dtype = self.given.get("params_dtype", torch.float32)
        parameter = torch.nn.Parameter(
            torch.zeros(shape, dtype=dtype, device=self.given.get("device"))
        )
        if split is not None:
            marks |= {"tensor_model_parallel": True, "partition_dim": split, "partition_stride": 1}
        for mark, value in marks.items():
            setattr(parameter, mark, value)
        self.register_parameter(name, parameter)

    def add_weight(self, name: str) -> None:
        rows, columns = self.shard()
        self.add(name, rows, columns, split=1 if self.parallel_mode == "row" else 0)

    def add_bias(self) -> None:
        assert self.parallel_mode == "column" and not self.given["return_bias"]
        self.add("bias", self.shard()[0], split=0)

    def shard(self) -> tuple[int, int]:
        """Return the rows and columns of this rank's shard of the weight."""
        rows, columns = self.given["out_features"], self.given["in_features"]
        if self.parallel_mode == "column":
            return rows // self.tp_size, columns
        if self.parallel_mode == "row":
            return rows, columns // self.tp_size
        return rows, columns

    def product(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ, with the exchange of tensor ranks before or after the product."""
        from megatron.core.tensor_parallel import mappings as m

        if self.parallel_mode == "column" and self.sequence_parallel:
            x = m.gather_from_sequence_parallel_region(x, group=self.tp_group)
        elif self.parallel_mode == "column":
            x = m.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        out = F.linear(x, self.weight, getattr(self, "bias", None))
        if self.parallel_mode == "row" and self.sequence_parallel:
            return m.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        if self.parallel_mode == "row":
            return m.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out


class Linear(_Module):
    _of = "Linear"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.add_weight("weight")
        if given["bias"]:
            self.add_bias()

    def forward(self, *given: Any, **named: Any) -> Tensor:
        return self.product(check_call("Linear.forward", *given, **named)["inp"])


class LayerNormLinear(_Module):
    _of = "LayerNormLinear"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        assert given["normalization"] == "RMSNorm", "RMSNorm has no layer_norm_bias"
        marks = {"sequence_parallel": self.sequence_parallel}
        self.add("layer_norm_weight", given["in_features"], **marks)
        self.add_weight("weight")
        if given["bias"]:
            self.add_bias()

    def forward(self, *given: Any, **named: Any) -> Tensor:
        x = check_call("LayerNormLinear.forward", *given, **named)["inp"]
        weight = self.layer_norm_weight
        return self.product(F.rms_norm(x, weight.shape, weight, self.given["eps"]))


class GroupedLinear(_Module):
    _of = "GroupedLinear"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        assert not given["bias"]
        for number in range(given["num_gemms"]):
            self.add_weight(f"weight{number}")

    def forward(self, *given: Any, **named: Any) -> Tensor:
        call = check_call("GroupedLinear.forward", *given, **named)
        counts = call["m_splits"]
        assert type(counts) is list and sum(counts) == len(call["inp"])
        parts = zip(call["inp"].split(counts), self.parameters(), strict=True)
        return torch.cat([F.linear(x, weight) for x, weight in parts])


class RMSNorm(_Module):
    _of = "RMSNorm"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # Megatron 0.16 passes the size as `hidden_size`, 0.19 as `normalized_shape`.
        [size] = (given[name] for name in ("normalized_shape", "hidden_size") if name in given)
        self.add("weight", size, sequence_parallel=given["sequence_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.given["eps"])


class DotProductAttention(_Module):
    _of = "DotProductAttention"

    def __init__(self, num_attention_heads: int, kv_channels: Any, **given: Any) -> None:
        super().__init__(num_attention_heads=num_attention_heads, kv_channels=kv_channels, **given)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Compute attention over a packed stream, [T, heads, head_dim], of complete sequences
        without padding."""
        call = check_call("DotProductAttention.forward", *given, **named)
        assert call["qkv_format"] == "thd" and call["attn_mask_type"] == "padding_causal"
        assert call["cu_seqlens_q"].dtype is torch.int32
        borders = call["cu_seqlens_q"].tolist()
        assert borders == call["cu_seqlens_kv"].tolist()
        assert call.get("cu_seqlens_q_padded") is None and call.get("attention_mask") is None
        query_THD = call["query_layer"]
        assert borders[0] == 0 and borders[-1] == len(query_THD)
        longest = max(stop - start for start, stop in pairwise(borders))
        assert type(call["max_seqlen_q"]) is int and call["max_seqlen_q"] >= longest
        scale = self.given["softmax_scale"] or query_THD.shape[-1] ** -0.5
        parts = []
        for start, stop in pairwise(borders):
            query, key, value = (
                call[f"{name}_layer"][start:stop].transpose(0, 1)
                for name in ("query", "key", "value")
            )
            out = F.scaled_dot_product_attention(
                query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts).flatten(1)


def apply_rotary_pos_emb(*given: Any, **named: Any) -> Tensor:
    """Compute the fused rotary kernel: positions restart with each sequence, and the table is read
    from its first row."""
    call = check_call("apply_rotary_pos_emb", *given, **named)
    assert call["fused"] and call["tensor_format"] == "thd" and call["cp_size"] == 1
    x_THD, angles_L11D = call["t"], call["freqs"]
    assert x_THD.dim() == 3 and angles_L11D.dtype is torch.float32
    borders = call["cu_seqlens"].tolist()
    assert borders[-1] == len(x_THD)
    lengths = [stop - start for start, stop in pairwise(borders)]
    assert max(lengths) <= len(angles_L11D), "the table is shorter than a sequence"
    angles_T1D = torch.cat([angles_L11D[:length, 0] for length in lengths])
    first, second = x_THD.chunk(2, -1)
    rotated_THD = torch.cat((-second, first), -1)
    return (x_THD * angles_T1D.cos() + rotated_THD * angles_T1D.sin()).to(x_THD.dtype)


def general_gemm(*given: Any, **named: Any) -> tuple[Tensor, None]:
    """Compute a product in cuBLAS's column order; Megatron uses the function for the router if it
    exists."""
    call = check_call("general_gemm", *given, **named)
    assert call["bias"] is None and call["out"] is None and not call["accumulate"]
    a, b = (call[name].to(call["out_dtype"]) for name in ("A", "B"))
    first = b.T if call["layout"][1] == "T" else b
    return first @ (a.T if call["layout"][0] == "T" else a), None


def _no_offload(*_: Any, **__: Any) -> tuple[Any, Any]:
    """Return the context of a forward pass whose activations stay on the GPU, and the function that
    is applied after it."""
    return nullcontext(), lambda tensor: tensor


class _ImportedOnly(ModuleType):
    """Module whose names are only imported and never called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (self.__name__, name) in ABSENT:
            raise AttributeError(name)
        found: Any = type(name, (), {})
        if not name[0].isupper():  # Functions whose result Megatron unpacks return a pair.
            found = mock.MagicMock(return_value=(None, None))
        setattr(self, name, found)
        return found


class _Finder:
    """Import finder and loader of `transformer_engine` and all its submodules."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        package, _, last = name.rpartition(".")
        if name.partition(".")[0] != "transformer_engine" or (package, last) in ABSENT:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _ImportedOnly(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "transformer_engine":
            module.__version__ = "2.11.0"  # type: ignore[attr-defined]
            importlib.import_module("transformer_engine.pytorch")
        if module.__name__ == "transformer_engine.pytorch":
            for kind in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention):
                setattr(module, kind.__name__, kind)
        if module.__name__ == "transformer_engine.pytorch.cpu_offload":
            module.get_cpu_offload_context = _no_offload  # type: ignore[attr-defined]
        if module.__name__ == "transformer_engine.pytorch.cpp_extensions":
            module.general_gemm = general_gemm  # type: ignore[attr-defined]
        if module.__name__ == "transformer_engine.pytorch.attention.rope":
            module.apply_rotary_pos_emb = apply_rotary_pos_emb  # type: ignore[attr-defined]


CASES = ("llama3", "qwen2_tied", "qwen2_yarn", "qwen3", "qwen3_moe", "mixtral")
DENSE_LAYOUTS = ("tp1", "tp2_sp", "tp2_pp2_sp")
EXPERT_LAYOUTS = ("ep1", "ep4", "tp2_sp_ep2")
# With Transformer Engine's grouped linear layers, and with one linear layer for each expert.
EXPERTS = ("transformer_engine", "sequential")
# A dense model and a model with experts are also trained with each choice of `trainer.recompute`.
RECOMPUTE = ("none", "feed_forward", 1)
RECOMPUTED = (("qwen2_tied", "tp2_sp"), ("qwen3_moe", "tp2_sp_ep2"))


def points(experts: str) -> list[tuple[str, str]]:
    """Return the models and layouts that are computed with this kind of experts."""
    moe = ("qwen3_moe", "mixtral")
    chosen = [(case, layout) for case in moe for layout in EXPERT_LAYOUTS]
    if experts == "sequential":
        return chosen[:3]
    return [(c, layout) for c in CASES if c not in moe for layout in DENSE_LAYOUTS] + chosen


@contextmanager
def engine_found() -> Iterator[None]:
    """Make the trainer detect Transformer Engine and a GPU on which it runs."""
    from megatron_async.trainer import capabilities

    found = capabilities.Capabilities("13.0", "a GPU", "2.11.0", None, None)
    with mock.patch.object(capabilities, "detect", lambda: found):
        yield


def log_probs(
    models: dict[str, str], mask_T: Tensor, folder: str, experts: str
) -> dict[tuple[str, str], Any]:
    """Run in each rank; return the log-probs that `test_model_parity` compares with
    transformers."""
    from tests.trainer import test_model_parity as parity

    with engine_found():
        return parity.check_layouts(models, points(experts), mask_T, folder, experts=experts)


def gradients(models: dict[str, str], layouts: Sequence[str]) -> dict[Any, float]:
    """Compare Transformer Engine's layers with local layers, in each rank.

    Returns:
        By model, layout and `trainer.recompute`: the largest relative difference of a gradient, or
        of all log-probs, from local layers without recomputation.
    """
    from megatron_async.config import build_config
    from megatron_async.trainer.device import device_adapter
    from megatron_async.trainer.parallel import destroy_parallel, init_parallel
    from tests.trainer import test_model_parity as parity

    found: dict[Any, float] = {}
    with device_adapter(), engine_found():
        for layout in layouts:
            for name in models if "ep" not in layout else ("qwen3_moe",):
                changes: dict[str, Any] = {"model": {"path": models[name], "dtype": "float32"}}
                changes |= {"parallel": {"ranks": parity.RANKS, **parity.ALL_LAYOUTS[layout]}}
                config = build_config(changes)
                init_parallel(config.parallel, config.trainer, seed=1)
                local = _train(config, "sdpa", "none")
                assert len(local) > 9
                assert all(float(local[key].norm()) > 0 for key in local if "expert" not in key)
                for recompute in RECOMPUTE if (name, layout) in RECOMPUTED else ("none",):
                    engine = _train(config, "auto", recompute)
                    assert engine.keys() == local.keys()
                    found[name, layout, recompute] = max(
                        float((engine[key] - local[key]).norm() / local[key].norm().clamp(1e-3))
                        for key in local
                    )
        destroy_parallel()
    return found


def _train(config: Any, attention_backend: str, recompute: Any) -> dict[str, Tensor]:
    """Return a batch's log-probs and the gradients of an SFT step with one kind of layers.

    Gradients are reduced over the ranks and named as the tensors of the published checkpoint.
    """
    from megatron_async.algorithms.algorithm import build_sft_algorithm
    from megatron_async.algorithms.device_batch import DeviceBatch
    from megatron_async.models.parameters import local_parameters
    from megatron_async.trainer.forward import PolicyRunner
    from megatron_async.trainer.optimizer import wrap_data_parallel
    from megatron_async.trainer.parallel import rank_layout
    from megatron_async.trainer.step import load_policy
    from tests.trainer.cases import ragged_batch

    config = config.with_section("model", attention_backend=attention_backend)
    [model] = load_policy(config.with_section("trainer", recompute=recompute))
    assert model.backends.transformer_engine == (attention_backend == "auto")
    wrapped = wrap_data_parallel(model, config.optimizer, bf16=False)
    wrapped.zero_grad_buffer()
    layout = rank_layout(torch.device("cpu"))
    runner = PolicyRunner(wrapped, layout, token_budget=128, hidden_size=32)
    sft = build_sft_algorithm()
    batch, denominators = sft.prepare_minibatch(sft.prepare(DeviceBatch.of(ragged_batch()))[0])
    result = runner.gradients(batch, sft, denominators, entropy=False)
    reduced = {
        " ".join(placed.tensor_names): placed.parameter.main_grad.clone()
        for placed in local_parameters([model], model.architecture)
    }
    return {"log-probs": result.logprobs_T, **reduced}


def compute(folder: Path) -> None:
    """Write log-probs and differences of gradients, from ranks forked from this process."""
    from tests.distributed import run_ranks
    from tests.trainer import test_model_parity as parity

    models = {name: str(folder / name) for name in CASES}
    mask_T = parity.mask_of_responses()
    few = {name: models[name] for name in ("qwen2_tied", "qwen3")}
    more = few | {"qwen3_moe": models["qwen3_moe"]}
    ranks: dict[str, Any] = {"timeout_seconds": 180, "method": "fork"}
    found: dict[str, Any] = {
        experts: run_ranks(
            log_probs, parity.RANKS, models, mask_T, f"{folder}/{experts}", experts, **ranks
        )
        for experts in EXPERTS
    }
    layouts = ("tp2_sp", "tp2_sp_ep2")
    found["gradients"] = run_ranks(gradients, parity.RANKS, more, layouts, **ranks)
    (folder / "found.pickle").write_bytes(pickle.dumps(found))


def main(folder: Path) -> None:
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    from megatron_async.trainer.device import import_megatron

    import_megatron()
    compute(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

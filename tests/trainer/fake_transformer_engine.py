"""Prints the parameters that Megatron's layers for Transformer Engine give each family.

    python -m tests.trainer.fake_transformer_engine FOLDER

Transformer Engine has no build without CUDA. Its modules are stand-ins here, with the signatures
and the names of parameters of its release 2.11 (tests/data/transformer_engine.json); Megatron's
specs and wrappers are its own. The stand-ins are in place before Megatron is imported, so this
needs a process of its own. Printed, for each family and kind of layers, as rank 0 of TP 2 x DP 2
with experts over 2 ranks: the tensors in the published checkpoint -> the parameter and its shape.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

SIGNATURES: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[1] / "data" / "transformer_engine.json").read_text()
)


class _Module(torch.nn.Module):
    """Takes what the module of its name takes."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.tp_size = given.get("tp_size", 1)
        taken = SIGNATURES[type(self)._of]
        inspect.Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in taken]).bind_partial(
            **given
        )
        self.given = given
        self.parallel_mode = given.get("parallel_mode")

    _of = ""

    def add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def shard(self) -> tuple[int, int]:
        """Rows and columns of this rank's part of the weight."""
        rows, columns = self.given["out_features"], self.given["in_features"]
        if self.parallel_mode == "column":
            return rows // self.tp_size, columns
        if self.parallel_mode == "row":
            return rows, columns // self.tp_size
        return rows, columns


class Linear(_Module):
    _of = "Linear"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.add("weight", *self.shard())
        if given["bias"]:
            self.add("bias", self.shard()[0])


class LayerNormLinear(_Module):
    _of = "LayerNormLinear"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        assert given["normalization"] == "RMSNorm", "no layer_norm_bias"
        self.add("layer_norm_weight", given["in_features"])
        self.add("weight", *self.shard())
        if given["bias"]:
            self.add("bias", self.shard()[0])


class GroupedLinear(_Module):
    _of = "GroupedLinear"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        assert not given["bias"]
        for number in range(given["num_gemms"]):
            self.add(f"weight{number}", *self.shard())


class RMSNorm(_Module):
    _of = "RMSNorm"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.add("weight", given["hidden_size"])


class DotProductAttention(_Module):
    _of = "DotProductAttention"

    def __init__(self, num_attention_heads: int, kv_channels: Any, **given: Any) -> None:
        super().__init__(num_attention_heads=num_attention_heads, kv_channels=kv_channels, **given)


class _Rest(ModuleType):
    """A module of which nothing is called, only imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any = type(name, (), {})
        if not name[0].isupper():  # what a function hands back here is a pair
            found = mock.MagicMock(return_value=(None, None))
        setattr(self, name, found)
        return found


class _Finder:
    """Finds `transformer_engine` and everything in it."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "transformer_engine":
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Rest(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "transformer_engine":
            module.__version__ = "2.11.0"  # type: ignore[attr-defined]
            importlib.import_module("transformer_engine.pytorch")
        if module.__name__ == "transformer_engine.pytorch":
            for kind in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention):
                setattr(module, kind.__name__, kind)


def parameters(folder: Path, engine: bool) -> dict[str, tuple[str, list[int]]]:
    """What one model has, by the names of its tensors in a published checkpoint."""
    from megatron_async.config import build_config
    from megatron_async.models.parameters import placed_parameters
    from megatron_async.trainer import capabilities
    from megatron_async.trainer.parallel import init_parallel
    from megatron_async.trainer.policy_model import build_policy
    from tests.trainer.fake_gpu import fake_world
    from tests.trainer.test_fake_gpu import NO_ENGINE

    found = replace(NO_ENGINE, transformer_engine="2.11.0" if engine else None)
    config = build_config(
        {
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "parallel": {
                "ranks": 4,
                "tensor": 2,
                "sequence": True,
                "expert": 2 if "expert" in (folder / "config.json").read_text() else 1,
            },
        }
    )
    with fake_world(config.parallel), mock.patch.object(capabilities, "detect", lambda: found):
        init_parallel(config.parallel, config.trainer, seed=1)
        [model] = build_policy(config.model, config.parallel, trainer=config.trainer, seed=0)
        assert model.backends.layers == ("transformer_engine" if engine else "local")
        return {
            " ".join(placed.tensor_names): (placed.name, list(placed.parameter.shape))
            for placed in placed_parameters([model], model.architecture)
        }


def main() -> None:
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    from megatron_async.trainer.device import device_adapter

    with device_adapter():
        result = {
            folder.name: [parameters(folder, engine) for engine in (False, True)]
            for folder in sorted(Path(sys.argv[1]).iterdir())
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

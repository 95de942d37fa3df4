"""A Hugging Face safetensors directory into this rank's Megatron shards, slice by slice.

Invariants
- A rank reads only the slices it holds; nothing larger than one shard is in memory beside the
  model itself.
- All or nothing is checked first: every tensor that the model needs is in the directory with the
  expected shape, and the directory has no tensor that the model does not know.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture
from megatron_async.models.families import rules_of
from megatron_async.models.parameters import placed_parameters, unwrap
from megatron_async.models.shards import split

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class SafetensorsDirectory:
    """Slices of the tensors in a model directory, from one file or from indexed shards.

    At most `max_open` files are mapped at a time (None: all that were read): what was read of a
    mapped file counts as this process's memory.
    """

    def __init__(self, model_dir: Path | str, *, max_open: int | None = None) -> None:
        self.path = Path(model_dir)
        self._max_open = max_open
        self._open: dict[str, Any] = {}
        self.file_of = self._files()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._open:
            self._close_oldest()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """`tensor[start:stop]` for dim 0, `tensor[:, start:stop]` for dim 1."""
        piece = self._slice(name)
        tensor: Tensor = piece[start:stop] if dim == 0 else piece[:, start:stop]
        return tensor

    def _slice(self, name: str) -> Any:
        return self._file(self.file_of[name]).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.path / name
            if self._max_open is not None and len(self._open) >= self._max_open:
                self._close_oldest()
            try:
                self._open[name] = safe_open(path, framework="pt").__enter__()
            except FileNotFoundError as error:
                raise UserError(f"model.path {self.path}: {name} is missing") from error
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} cannot be read: {error}") from error
        return self._open[name]

    def _close_oldest(self) -> None:
        self._open.pop(next(iter(self._open))).__exit__(None, None, None)

    def _files(self) -> dict[str, str]:
        index = self.path / INDEX_FILE
        if index.exists():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index} cannot be read: {error}") from error
            return dict(weight_map)
        if not (self.path / SINGLE_FILE).exists():
            raise UserError(
                f"model.path {self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights must "
                "be safetensors"
            )
        return dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)


def check_tensors(directory: SafetensorsDirectory, architecture: Architecture) -> None:
    """Raises UserError when a tensor is missing, unknown or of another shape."""
    expected: dict[str, tuple[int, ...]] = {}
    experts = architecture.experts.num if architecture.experts else 1
    for rule in rules_of(architecture):
        for layer in range(architecture.num_layers if "{layer}" in rule.tensors[0] else 1):
            for expert in range(experts if rule.expert else 1):
                names = rule.tensor_names(layer, expert)
                expected.update(zip(names, rule.shapes, strict=True))
    for name, shape in expected.items():
        if name not in directory.file_of:
            raise UserError(f"model.path {directory.path}: tensor {name} is missing")
        if directory.shape(name) != shape:
            raise UserError(
                f"model.path {directory.path}: tensor {name} has shape {directory.shape(name)}, "
                f"config.json asks for {shape}"
            )
    allowed = {"lm_head.weight"} if architecture.tied_head else set()
    for name in directory.file_of:
        if name not in expected and name not in allowed and not name.endswith(".inv_freq"):
            raise UserError(
                f"model.path {directory.path}: tensor {name} is unknown to family "
                f"{architecture.family}"
            )


@torch.no_grad()
def load_hf_weights(chunks: Sequence[torch.nn.Module], model_dir: Path | str) -> None:
    """Fill this rank's parameters from a Hugging Face directory, in the parameters' precision.

    Raises UserError for a missing, damaged or unfitting checkpoint.
    """
    architecture: Architecture = unwrap(chunks[0]).architecture
    with SafetensorsDirectory(model_dir) as directory:
        check_tensors(directory, architecture)
        for placed in placed_parameters(chunks, architecture):
            shard = split(
                placed.rule, placed.tensor_names, directory.read, placed.size, placed.rank
            )
            if shard.shape != placed.parameter.shape:
                raise ValueError(
                    f"{placed.name}: shard {tuple(shard.shape)}, "
                    f"parameter {tuple(placed.parameter.shape)}"
                )
            placed.parameter.copy_(shard)

"""The safetensors files of a Hugging Face model directory, and whether config.json fits them.

Invariants
- Checks import neither torch nor Megatron: the command line calls them before anything starts.
- The numbers of the weights are looked at too: NaN, infinity, and a matrix of zeros are refused.
- A directory that passes holds every tensor that the model needs, with the expected shape and as
  floating-point numbers, in files of the length in their headers, and no tensor that the model does
  not know.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from megatron_async.config.files import read_json_object
from megatron_async.errors import UserError, short_repr
from megatron_async.models.architecture import Architecture
from megatron_async.models.families import stage_rules

if TYPE_CHECKING:
    from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
VERSION_KEY = "policy_version"
"""In the metadata of a file that a run has written."""
_LFS_POINTER = b"version https://git-lfs"
# Bits of each type of weight: an unsigned type of its size, and its exponent.
_FLOATS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_READ_WHOLE_BYTES = 8 << 30  # of a larger model the trainers read the rest, and check it
_READ_BYTES_OF_EACH = 1 << 20
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_MAY_BE_ZERO = ("o_proj", "down_proj", ".w2.", ".gate.")  # at the start of a training


class SafetensorsDirectory:
    """Slices of the tensors in a model directory, from one file or from indexed shards.

    At most `max_open` files are mapped at a time (None: all that were read): what was read of a
    mapped file counts as this process's memory. `framework`: of what is read, as safetensors calls
    it; only "pt" imports torch.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        max_open: int | None = None,
        framework: Literal["pt", "np"] = "pt",
    ) -> None:
        self.path = Path(model_dir)
        self._framework = framework
        self._max_open = max_open
        self._open: dict[str, Any] = {}
        self.file_of = self._files()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._close_oldest()

    def open_all(self) -> None:
        """Open every file; UserError names one that is missing or damaged."""
        for file in sorted(set(self.file_of.values())):
            self._file(file)

    def version(self) -> str:
        """Return the policy version that a run has exported; empty for any other model."""
        metadata = self._file(next(iter(self.file_of.values()))).metadata() or {}
        return str(metadata.get(VERSION_KEY, ""))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the tensor's data type as the file names it, such as BF16."""
        return str(self._slice(name).get_dtype())

    def content(self, name: str) -> memoryview:
        """Return the tensor's bytes, mapped from its file."""
        file = self.path / self.file_of[name]
        header, offset = _header(file)
        start, end = header[name]["data_offsets"]
        return np.memmap(file, np.uint8, "r", offset + start, (end - start,)).data

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """`tensor[start:stop]` for dim 0, `tensor[:, start:stop]` for dim 1."""
        piece = self._slice(name)
        tensor: Tensor = piece[start:stop] if dim == 0 else piece[:, start:stop]
        return tensor

    def _slice(self, name: str) -> Any:
        file = self.file_of[name]
        try:
            return self._file(file).get_slice(name)
        except SafetensorError as error:
            raise UserError(
                f"model.path {self.path}: {INDEX_FILE} has tensor {name} in {file}, which "
                "does not hold it"
            ) from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.path / name
            if self._max_open is not None and len(self._open) >= self._max_open:
                self._close_oldest()
            try:
                self._open[name] = safe_open(path, framework=self._framework).__enter__()
            except FileNotFoundError as error:
                raise UserError(f"model.path {self.path}: {name} is missing") from error
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"model.path: {path} cannot be read: {_cause(path, error)}"
                ) from error
        return self._open[name]

    def _close_oldest(self) -> None:
        self._open.pop(next(iter(self._open))).__exit__(None, None, None)

    def _files(self) -> dict[str, str]:
        index = self.path / INDEX_FILE
        if not index.exists():
            if not (self.path / SINGLE_FILE).exists():
                raise UserError(
                    f"model.path {self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights "
                    "must be safetensors"
                )
            return dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        weight_map = read_json_object(index, f"model.path: {index}").get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(
                f"model.path: {index} has the weight_map {short_repr(weight_map)}; it must map "
                "each tensor to its file"
            )
        for name, file in weight_map.items():
            if not isinstance(file, str) or file != Path(file).name or not file.isprintable():
                raise UserError(
                    f"model.path: {index} names {short_repr(file)} as the file of tensor {name}; "
                    "it must be a file beside it"
                )
        return dict(weight_map)


def _cause(path: Path, error: Exception) -> str:
    """Explain a fault of a file of weights, and the remedy, as far as its bytes show it."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if not start:
            return "it is empty (0 bytes); download it again"
        if start == _LFS_POINTER:
            return "it is a pointer of Git LFS and no weights; run `git lfs pull` where it lies"
    if isinstance(error, SafetensorError):
        return f"{error}; it is cut off or damaged, download it again"
    return str(error)


def expected_tensors(architecture: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every Hugging Face tensor of the model."""
    experts = architecture.experts.num if architecture.experts else 1
    for rule, layer in stage_rules(architecture):
        for expert in range(experts if rule.expert else 1):
            yield from zip(rule.tensor_names(layer, expert), rule.shapes, strict=True)


def check_tensors(directory: SafetensorsDirectory, architecture: Architecture) -> None:
    """Raises UserError when a tensor is missing, unknown, or not as config.json describes it."""
    where = f"model.path {directory.path}: tensor"
    expected = {_HEAD} if architecture.tied_head else set()
    for name, shape in expected_tensors(architecture):
        expected.add(name)
        if name not in directory.file_of:
            raise UserError(
                f"{where} {name} is missing; config.json asks for {architecture.num_layers} "
                f"layers of family {architecture.family}"
            )
        if directory.shape(name) != shape:
            raise UserError(
                f"{where} {name} has shape {directory.shape(name)}, config.json asks for {shape}"
            )
        if directory.dtype(name) not in _FLOATS:
            raise UserError(
                f"{where} {name} holds {directory.dtype(name)}; weights must be one of "
                f"{', '.join(_FLOATS)}"
            )
    for name in directory.file_of:
        if name not in expected and not name.endswith(".inv_freq"):
            raise UserError(
                f"{where} {name} is unknown to family {architecture.family} with the "
                f"{architecture.num_layers} layers that config.json asks for"
            )
    if architecture.tied_head and {_HEAD, _EMBEDDING} <= directory.file_of.keys():
        kinds = {(directory.shape(name), directory.dtype(name)) for name in (_HEAD, _EMBEDDING)}
        if len(kinds) > 1 or directory.content(_HEAD) != directory.content(_EMBEDDING):
            raise UserError(
                f"{where} {_HEAD} differs from {_EMBEDDING}, and config.json has "
                "tie_word_embeddings true, with which it would be lost. Set tie_word_embeddings to "
                "false, or remove the tensor."
            )


def check_weights(model_dir: Path | str, architecture: Architecture | None) -> None:
    """Compare every file of the directory with config.json, and look at the weights.

    `architecture` None: engines alone use the model, of whatever family; its numbers are looked at.
    Raises UserError. Of a model of more than 8 GiB it reads the beginning of each tensor.
    """
    with SafetensorsDirectory(model_dir, framework="np") as directory:
        directory.open_all()
        if architecture is not None:
            check_tensors(directory, architecture)
        files = sorted({directory.path / file for file in directory.file_of.values()})
    whole = sum(file.stat().st_size for file in files) <= _READ_WHOLE_BYTES
    for file in files:
        for name, bits, exponent in _bits(file, None if whole else _READ_BYTES_OF_EACH):
            _check_numbers(f"model.path: {file}: tensor {name}", name, bits, exponent, architecture)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file, and where its tensors begin."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length


def _bits(file: Path, most_bytes: int | None) -> Iterator[tuple[str, npt.NDArray[Any], int]]:
    """Name, bits and mask of the exponent of each tensor of a safetensors file."""
    header, offset = _header(file)
    for name, tensor in header.items():
        if name == "__metadata__" or tensor["dtype"] not in _FLOATS:
            continue
        kind, exponent = _FLOATS[tensor["dtype"]]
        start, end = tensor["data_offsets"]
        size = end - start if most_bytes is None else min(end - start, most_bytes)
        count = size // np.dtype(kind).itemsize
        yield name, np.fromfile(file, kind, count, offset=offset + start), exponent


def _check_numbers(
    where: str, name: str, bits: npt.NDArray[Any], exponent: int, architecture: Architecture | None
) -> None:
    remedy = "download the model again, or take another checkpoint of it"
    if bool(((bits & exponent) == exponent).any()):
        raise UserError(f"{where} holds NaN or infinity; {remedy}")
    if "norm" in name:
        may_be_zero = architecture is None or architecture.zero_centered_norm
    else:
        may_be_zero = not name.endswith("weight") or any(part in name for part in _MAY_BE_ZERO)
    if not may_be_zero and bits.size and not bool((bits << 1).any()):  # -0.0 is zero too
        raise UserError(f"{where} is all zero; {remedy}")

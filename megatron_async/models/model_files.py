"""Reads the safetensors files of a Hugging Face model directory, and checks them against
config.json.

Invariants
- Checks import neither torch nor Megatron, because the command line makes them before anything
  starts.
- The values of the weights are checked too: NaN, infinity and a matrix of zeros are refused.
- A directory that passes contains every tensor that the model needs, with the expected shape and as
  floating-point numbers, in files as long as their headers say, and no tensor that the model does
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
"""Key in the metadata of a safetensors file that a run has written; its value is the policy version
of the weights."""
_LFS_POINTER = b"version https://git-lfs"
# For each data type of weights: an unsigned integer type of the same size, and the bit mask of the
# exponent.
_FLOATS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
# Size up to which all values of a model are checked. In a larger model, only the first
# `_READ_BYTES_OF_EACH` bytes of each tensor are checked here; trainer ranks check the rest when
# they load it.
_READ_WHOLE_BYTES = 8 << 30
_READ_BYTES_OF_EACH = 1 << 20
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Parts of names of matrices that may be all zero in a valid model, for instance if they were
# initialized so.
_MAY_BE_ZERO = ("o_proj", "down_proj", ".w2.", ".gate.")


class SafetensorsDirectory:
    """Reads slices of the tensors in a model directory, which has one safetensors file, or several
    with an index.

    It is a context manager that closes the files.

    Attributes:
        path: The directory.
        file_of: Name of the file with each tensor, by the tensor's name.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        max_open: int | None = None,
        framework: Literal["pt", "np"] = "pt",
    ) -> None:
        """Read the names of the tensors; no values are read yet.

        Args:
            model_dir: The directory.
            max_open: Number of files that stay memory-mapped at a time; None means no limit. A
                limit saves memory, because the pages that were read from a mapped file count as
                memory of this process.
            framework: Type of the slices that are read, as safetensors names it; only "pt" imports
                torch.

        Raises:
            UserError: If the directory has no safetensors, or its index is damaged.
        """
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
        """Open every file of the directory to check that it can be read.

        Raises:
            UserError: If a file is missing or damaged; the message names the file.
        """
        for file in sorted(set(self.file_of.values())):
            self._file(file)

    def version(self) -> str:
        """Return the policy version of the weights if a run has exported them, otherwise an empty
        string."""
        metadata = self._file(next(iter(self.file_of.values()))).metadata() or {}
        return str(metadata.get(VERSION_KEY, ""))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the data type of tensor `name` as the file has it, such as BF16."""
        return str(self._slice(name).get_dtype())

    def content(self, name: str) -> memoryview:
        """Return the bytes of tensor `name`, memory-mapped from its file."""
        file = self.path / self.file_of[name]
        header, offset = _header(file)
        start, end = header[name]["data_offsets"]
        return np.memmap(file, np.uint8, "r", offset + start, (end - start,)).data

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Read the slice [start, stop) along axis `dim` (0 or 1) of tensor `name`."""
        piece = self._slice(name)
        tensor: Tensor = piece[start:stop] if dim == 0 else piece[:, start:stop]
        return tensor

    def _slice(self, name: str) -> Any:
        """Return the lazy slice object of tensor `name`.

        Raises:
            UserError: If the tensor is not in the file that the index names.
        """
        file = self.file_of[name]
        try:
            return self._file(file).get_slice(name)
        except SafetensorError as error:
            raise UserError(
                f"model.path {self.path}: {INDEX_FILE} says that tensor {name} is in {file}, which "
                "does not contain it"
            ) from error

    def _file(self, name: str) -> Any:
        """Return the open file `name`; open it if it is not open.

        Raises:
            UserError: If the file is missing or damaged.
        """
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
        """Close the file that was opened first."""
        self._open.pop(next(iter(self._open))).__exit__(None, None, None)

    def _files(self) -> dict[str, str]:
        """Return the name of the file of each tensor, by the tensor's name. It is read from the
        index, or from the single file if there is no index.

        Raises:
            UserError: If the directory has no safetensors, or its index is damaged.
        """
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
                    "it must be the name of a file in the same directory"
                )
        return dict(weight_map)


def _cause(path: Path, error: Exception) -> str:
    """Return a message that says why a file of weights cannot be read and what to do, as far as its
    first bytes and `error` show it."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if not start:
            return "it is empty (0 bytes); download it again"
        if start == _LFS_POINTER:
            return "it is a Git LFS pointer, not the weights; run `git lfs pull` in its directory"
    if isinstance(error, SafetensorError):
        return f"{error}; it is truncated or damaged, download it again"
    return str(error)


def expected_tensors(architecture: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Generate the name and shape of every Hugging Face tensor of the model."""
    experts = architecture.experts.num if architecture.experts else 1
    for rule, layer in stage_rules(architecture):
        for expert in range(experts if rule.expert else 1):
            yield from zip(rule.tensor_names(layer, expert), rule.shapes, strict=True)


def check_tensors(directory: SafetensorsDirectory, architecture: Architecture) -> None:
    """Check that a directory has exactly the tensors that follow from config.json.

    Raises:
        UserError: If a tensor is missing, unknown, or has another shape or type.
    """
    where = f"model.path {directory.path}: tensor"
    expected = {_HEAD} if architecture.tied_head else set()
    for name, shape in expected_tensors(architecture):
        expected.add(name)
        if name not in directory.file_of:
            raise UserError(
                f"{where} {name} is missing; config.json requires {architecture.num_layers} "
                f"layers of family {architecture.family}"
            )
        if directory.shape(name) != shape:
            raise UserError(
                f"{where} {name} has shape {directory.shape(name)}; config.json requires {shape}"
            )
        if directory.dtype(name) not in _FLOATS:
            raise UserError(
                f"{where} {name} has data type {directory.dtype(name)}; weights must be one of "
                f"{', '.join(_FLOATS)}"
            )
    for name in directory.file_of:
        if name not in expected and not name.endswith(".inv_freq"):
            raise UserError(
                f"{where} {name} is unknown to family {architecture.family} with the "
                f"{architecture.num_layers} layers that config.json states"
            )
    if architecture.tied_head and {_HEAD, _EMBEDDING} <= directory.file_of.keys():
        kinds = {(directory.shape(name), directory.dtype(name)) for name in (_HEAD, _EMBEDDING)}
        if len(kinds) > 1 or directory.content(_HEAD) != directory.content(_EMBEDDING):
            raise UserError(
                f"{where} {_HEAD} differs from {_EMBEDDING}, and config.json has "
                "tie_word_embeddings true, which ignores that tensor. Set tie_word_embeddings to "
                "false, or remove the tensor."
            )


def check_weights(model_dir: Path | str, architecture: Architecture | None) -> None:
    """Check that the files of a model directory can be read and fit config.json, and that their
    values are finite and, except in tensors that may be zero, not all zero.

    If the model is larger than 8 GiB, only the values at the start of each tensor are read.

    Args:
        model_dir: The model directory.
        architecture: The architecture that config.json describes. None means a model that only
            engines use, of any family, whose tensors' names and shapes are not checked.

    Raises:
        UserError: If a check fails.
    """
    with SafetensorsDirectory(model_dir, framework="np") as directory:
        directory.open_all()
        if architecture is not None:
            check_tensors(directory, architecture)
        files = sorted({directory.path / file for file in directory.file_of.values()})
    read_all = sum(file.stat().st_size for file in files) <= _READ_WHOLE_BYTES
    for file in files:
        for name, bits, exponent in _bits(file, None if read_all else _READ_BYTES_OF_EACH):
            _check_numbers(f"model.path: {file}: tensor {name}", name, bits, exponent, architecture)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file; return it, and the number of the first byte after
    it."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length


def _bits(file: Path, max_bytes: int | None) -> Iterator[tuple[str, npt.NDArray[Any], int]]:
    """Generate, for each floating-point tensor of a file, its name, its values' bits as unsigned
    integers, and the mask of the exponent in these bits.

    Args:
        file: The safetensors file.
        max_bytes: Largest number of bytes that are read of each tensor; None means all.
    """
    header, offset = _header(file)
    for name, tensor in header.items():
        if name == "__metadata__" or tensor["dtype"] not in _FLOATS:
            continue
        kind, exponent = _FLOATS[tensor["dtype"]]
        start, end = tensor["data_offsets"]
        size = end - start if max_bytes is None else min(end - start, max_bytes)
        count = size // np.dtype(kind).itemsize
        yield name, np.fromfile(file, kind, count, offset=offset + start), exponent


def _check_numbers(
    where: str, name: str, bits: npt.NDArray[Any], exponent: int, architecture: Architecture | None
) -> None:
    """Check that values of tensor `name` are finite, and that they are not all zero unless the
    tensor may be.

    Args:
        where: The tensor's file and name, for the error message.
        bits: The values' bits as unsigned integers.
        exponent: Mask of the exponent in those bits.
        architecture: The model's architecture; None if its family is unknown.

    Raises:
        UserError: If the check fails.
    """
    remedy = "Download the model again, or use another checkpoint of it"
    if bool(((bits & exponent) == exponent).any()):
        raise UserError(f"{where} contains NaN or infinity. {remedy}")
    if "norm" in name:
        may_be_zero = architecture is None or architecture.zero_centered_norm
    else:
        may_be_zero = not name.endswith("weight") or any(word in name for word in _MAY_BE_ZERO)
    # The shift removes the sign bit, so that -0.0 counts as zero.
    if not may_be_zero and bits.size and not bool((bits << 1).any()):
        raise UserError(f"{where} is all zero. {remedy}")

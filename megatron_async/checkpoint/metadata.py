"""What of a distributed checkpoint is pickled, unpickled without trust.

torch writes `.metadata`, and every object that is no tensor, as a pickle, and a pickle can run any
program. A checkpoint may come from somebody else (`model.checkpoint`, `convert --src`, a run
directory that others can write to), and its checksums only say that it arrived whole.

Invariants
- Of `.metadata`, only the classes that torch's own metadata consists of are ever constructed; of
  the rest, what torch's `weights_only` allows.
- The checks pass before torch or Megatron-core read the same bytes with plain `pickle`.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_async.checkpoint.manifest import CorruptCheckpoint

METADATA_NAME: Final = ".metadata"
COMMON_NAME: Final = "common.pt"  # Megatron-core's name for what no rank shares

_DESCRIPTIONS = "torch.distributed.checkpoint.metadata"
_ALLOWED: Final = frozenset(
    [
        (_DESCRIPTIONS, "Metadata"),
        (_DESCRIPTIONS, "MetadataIndex"),
        (_DESCRIPTIONS, "StorageMeta"),
        (_DESCRIPTIONS, "TensorStorageMetadata"),
        (_DESCRIPTIONS, "BytesStorageMetadata"),
        (_DESCRIPTIONS, "ChunkStorageMetadata"),
        (_DESCRIPTIONS, "TensorProperties"),
        (_DESCRIPTIONS, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),  # where the checkpoint was written
    ]
)


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses every name that metadata does not need."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def check_metadata(folder: Path) -> Metadata:
    """Raises CorruptCheckpoint when the metadata is missing, torn, or more than metadata."""
    try:
        with (folder / METADATA_NAME).open("rb") as stream:
            content = _MetadataUnpickler(stream).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise CorruptCheckpoint(f"{METADATA_NAME} cannot be read: {error}") from error
    if not isinstance(content, Metadata):
        raise CorruptCheckpoint(f"{METADATA_NAME} holds a {type(content).__name__}")
    return content


def check_objects(folder: Path, part: int = 0, parts: int = 1) -> None:
    """`check_metadata`, and a share of the objects that are no tensors: every `parts`-th.

    torch reads tensors with `weights_only` itself, and everything else without. Raises
    CorruptCheckpoint.
    """
    metadata = check_metadata(folder)
    # Not "those that are called bytes": what is called a tensor and is none must not slip through.
    stored = [
        (index.fqn, info)
        for index, info in (metadata.storage_data or {}).items()
        if type(metadata.state_dict_metadata.get(index.fqn)) is not TensorStorageMetadata
    ]
    try:
        stored.sort(key=lambda entry: (entry[0], entry[1].offset))
        for name, info in stored[part::parts]:
            _check_object(name, _bytes_of(folder, name, info))
    except (AttributeError, TypeError) as error:  # a pickle may leave out or replace any field
        raise CorruptCheckpoint(f"{METADATA_NAME} describes no object: {error}") from error
    if part == 0:
        _check_object(COMMON_NAME, folder / COMMON_NAME)


def _bytes_of(folder: Path, name: str, info: _StorageInfo) -> io.BytesIO:
    if info.transform_descriptors:
        raise CorruptCheckpoint(f"object {name} is stored in a form that no save of ours has")
    try:
        with (folder / info.relative_path).open("rb") as stream:
            stream.seek(info.offset)
            return io.BytesIO(stream.read(info.length))
    except OSError as error:
        raise CorruptCheckpoint(f"object {name} cannot be read: {error}") from error


def _check_object(name: str, source: io.BytesIO | Path) -> None:
    try:
        torch.load(source, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptCheckpoint(f"{name} holds more than values: {reason}") from error

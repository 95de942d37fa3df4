"""What of a distributed checkpoint is pickled, unpickled without trust.

torch writes `.metadata`, and every object that is no tensor, as a pickle, and a pickle can run any
program. A checkpoint may come from somebody else (`model.checkpoint`, `convert --src`, a run
directory that others can write to), and its checksums only say that it arrived whole.

Invariants
- Of `.metadata`, only the classes that torch's own metadata consists of are ever constructed; of
  the rest, what torch's `weights_only` allows.
- The checks pass before torch or Megatron-core read the same bytes with plain `pickle`.
- No memory is taken for what the files are too short to hold.
- Only regular files inside the checkpoint's folder are read, whatever name it gives.

Not covered: a pickle or an archive that is made to need far more memory than it has bytes, or a
file whose bytes are said to be many pieces. Reading them may end the process.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_async.checkpoint.manifest import CorruptCheckpoint, file_in

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


@contextmanager
def corrupt_where(what: str) -> Iterator[None]:
    """Whatever goes wrong over somebody's bytes is their fault: a pickle can raise anything.

    MemoryError too, by a length that it claims.
    """
    try:
        yield
    except CorruptCheckpoint:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptCheckpoint(f"{what}: {reason}") from error


def check_metadata(folder: Path) -> Metadata:
    """Raises CorruptCheckpoint when the metadata is missing, torn, or more than metadata."""
    with (
        corrupt_where(f"{METADATA_NAME} cannot be read"),
        file_in(folder, METADATA_NAME).open("rb") as stream,
    ):
        content = _MetadataUnpickler(stream).load()
    if not isinstance(content, Metadata):
        raise CorruptCheckpoint(f"{METADATA_NAME} holds a {type(content).__name__}")
    return content


def check_objects(folder: Path, part: int = 0, parts: int = 1) -> None:
    """`check_metadata`, the files, and a share of the objects (no tensors): every `parts`-th.

    torch reads tensors with `weights_only` itself, and everything else without. Raises
    CorruptCheckpoint.
    """
    metadata = check_metadata(folder)
    with corrupt_where(f"{METADATA_NAME} describes no objects"):
        for name in {info.relative_path for info in (metadata.storage_data or {}).values()}:
            file_in(folder, name)  # torch opens those of the tensors as they are named
        # Any field may be left out or replaced. And not "those that are called bytes": what is
        # called a tensor and is none must not slip by.
        stored = [
            (index.fqn, info)
            for index, info in (metadata.storage_data or {}).items()
            if type(metadata.state_dict_metadata.get(index.fqn)) is not TensorStorageMetadata
        ]
        stored.sort(key=lambda entry: (entry[0], entry[1].offset))
    for name, info in stored[part::parts]:
        _check_object(name, stored_bytes(folder, f"object {name}", info))
    if part == 0:
        with corrupt_where(f"{COMMON_NAME} cannot be read"):
            common = file_in(folder, COMMON_NAME)
        _check_object(COMMON_NAME, common)


def stored_length(folder: Path, what: str, info: _StorageInfo) -> int:
    """Bytes that the files of `folder` hold of it. Raises CorruptCheckpoint."""
    with corrupt_where(f"{what} cannot be read"):
        if info.transform_descriptors:
            raise CorruptCheckpoint(f"{what} is stored in a form that no save of ours has")
        begin, end = info.offset, info.offset + info.length
        size = file_in(folder, info.relative_path).stat().st_size
        if not 0 <= begin <= end <= size:
            raise CorruptCheckpoint(
                f"{what} is said to be bytes {begin} to {end} of {info.relative_path}, which has "
                f"{size}"
            )
        return int(info.length)


def stored_bytes(folder: Path, what: str, info: _StorageInfo) -> io.BytesIO:
    """What the files of `folder` hold of it. Raises CorruptCheckpoint."""
    length = stored_length(folder, what, info)
    with (
        corrupt_where(f"{what} cannot be read"),
        file_in(folder, info.relative_path).open("rb") as stream,
    ):
        stream.seek(info.offset)
        return io.BytesIO(stream.read(length))


def _check_object(name: str, source: io.BytesIO | Path) -> None:
    with corrupt_where(f"{name} holds more than values"):
        torch.load(source, map_location="cpu", weights_only=True)

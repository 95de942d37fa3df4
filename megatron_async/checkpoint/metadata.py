"""The `.metadata` of a distributed checkpoint, unpickled without trust.

torch writes it as a pickle, and a pickle can run any program. A checkpoint may come from somebody
else (`model.checkpoint`, `convert --src`), and its checksums only say that it arrived whole.

Invariants
- Only the classes that torch's own metadata consists of are ever constructed.
- `check_metadata` passes before torch or Megatron-core read the same file with plain `pickle`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_async.checkpoint.manifest import CorruptCheckpoint

METADATA_NAME: Final = ".metadata"

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


def check_metadata(folder: Path) -> None:
    """Raises CorruptCheckpoint when the metadata is missing, torn, or more than metadata."""
    try:
        with (folder / METADATA_NAME).open("rb") as stream:
            content = _MetadataUnpickler(stream).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise CorruptCheckpoint(f"{METADATA_NAME} cannot be read: {error}") from error
    if not isinstance(content, Metadata):
        raise CorruptCheckpoint(f"{METADATA_NAME} holds a {type(content).__name__}")

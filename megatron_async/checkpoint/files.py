"""Distributed-checkpoint files without a model: written rank by rank, read tensor by tensor.

The format is torch.distributed.checkpoint's as Megatron-core writes it: `.distcp` files that hold
one serialised tensor after another, and `.metadata` that says which global tensor each is part of.

Invariants
- One piece is in memory at a time; the files are appended to.
- Only tensors and torch's own metadata classes are unpickled (`weights_only` for tensors,
  `check_metadata` for the metadata).
- Whatever the metadata says, a tensor is read or the checkpoint is corrupt in one sentence.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_async.checkpoint.manifest import CorruptCheckpoint
from megatron_async.checkpoint.metadata import (
    METADATA_NAME,
    check_metadata,
    corrupt_where,
    stored_bytes,
    stored_length,
)
from megatron_async.checkpoint.placement import Piece


class ShardFiles:
    """Writes `.distcp` files, one for each rank of a layout, and their metadata."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: list[BinaryIO] = [
            self._stack.enter_context((folder / f"__{rank}_0.distcp").open("wb"))
            for rank in range(ranks)
        ]
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def add(self, rank: int, key: str, global_shape: Sequence[int], piece: Piece) -> None:
        """Append one piece to rank `rank`'s file. Raises OSError."""
        file = self._files[rank]
        begin = file.tell()
        # A slice of a larger tensor would be saved with all of its storage.
        torch.save(piece.tensor.clone(memory_format=torch.contiguous_format), file)
        known = self._tensors.get(key)
        if known is None:
            properties = TensorProperties.create_from_tensor(piece.tensor)
            known = TensorStorageMetadata(properties, torch.Size(global_shape), [])
            self._tensors[key] = known
        offsets = torch.Size(piece.offsets)
        known.chunks.append(ChunkStorageMetadata(offsets, piece.tensor.shape))
        index = MetadataIndex(key, offsets, len(known.chunks) - 1)
        self._storage[index] = _StorageInfo(
            self._name(rank), begin, file.tell() - begin, transform_descriptors=None
        )

    def finish(self) -> None:
        """Write the metadata. Raises OSError."""
        for file in self._files:
            file.flush()
        metadata = Metadata(self._tensors, storage_data=self._storage, version=CURRENT_DCP_VERSION)
        with (self._folder / METADATA_NAME).open("wb") as stream:
            pickle.dump(metadata, stream)

    @staticmethod
    def _name(rank: int) -> str:
        return f"__{rank}_0.distcp"


class ShardReader:
    """Reads one layer's (and expert's) parameter at a time from a distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Raises CorruptCheckpoint when the metadata cannot be read."""
        self._folder = folder
        self._tensors: dict[str, TensorStorageMetadata] = {}
        # By place on the first axis (the layer, where layers are stacked), so that a look-up does
        # not go through the chunks of all layers.
        self._chunks: dict[tuple[str, int], list[ChunkStorageMetadata]] = {}
        check_metadata(folder)
        with corrupt_where(f"{METADATA_NAME} describes no tensors"):
            metadata = FileSystemReader(folder).read_metadata()
            self._storage: dict[MetadataIndex, Any] = metadata.storage_data
            for key, description in metadata.state_dict_metadata.items():
                if isinstance(description, TensorStorageMetadata):
                    self._tensors[key] = description
                    for chunk in description.chunks:
                        first = chunk.offsets[0] if chunk.offsets else 0
                        self._chunks.setdefault((key, first), []).append(chunk)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape. Raises CorruptCheckpoint."""
        with corrupt_where(f"tensor {key} has no shape"):
            return tuple(torch.Size(self._tensors[key].size))

    def read(self, key: str, lead: tuple[int, ...]) -> Tensor:
        """The whole tensor below position `lead` of the leading axes.

        Raises CorruptCheckpoint when the pieces do not cover it.
        """
        with corrupt_where(f"tensor {key} cannot be read"):
            return self._read(key, lead)

    def _read(self, key: str, lead: tuple[int, ...]) -> Tensor:
        description, depth = self._tensors[key], len(lead)
        shape, dtype = description.size[depth:], description.properties.dtype
        chunks = [c for c in self._candidates(key, lead) if tuple(c.offsets[:depth]) == lead]
        held = sum(
            stored_length(self._folder, f"tensor {key}", self._info(key, chunk)) for chunk in chunks
        )
        if shape.numel() * dtype.itemsize > held:  # before memory is taken for it
            raise CorruptCheckpoint(
                f"tensor {key} at {lead} has shape {tuple(shape)} of {dtype}, and the files hold "
                f"{held} bytes of it"
            )
        whole = torch.empty(shape, dtype=dtype)
        covered = 0
        for chunk in chunks:
            part = self._load(key, chunk).reshape(chunk.sizes[depth:])
            where = tuple(
                slice(start, start + length)
                for start, length in zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            )
            whole[where] = part
            covered += part.numel()
        if covered != whole.numel():
            raise CorruptCheckpoint(
                f"tensor {key} at {lead} has {covered} of {whole.numel()} elements"
            )
        return whole

    def _candidates(self, key: str, lead: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        if lead:
            return self._chunks.get((key, lead[0]), [])
        return self._tensors[key].chunks

    def _info(self, key: str, chunk: ChunkStorageMetadata) -> _StorageInfo:
        info: _StorageInfo = self._storage[MetadataIndex(key, chunk.offsets)]
        return info

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        content = stored_bytes(self._folder, f"tensor {key}", self._info(key, chunk))
        tensor: Tensor = torch.load(content, map_location="cpu", weights_only=True)
        return tensor

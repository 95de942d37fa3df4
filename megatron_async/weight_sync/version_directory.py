"""A directory that holds one policy version: safetensors shards, an index, a manifest.

    <directory>/<name>/{model-00-00001.safetensors, ..., model.safetensors.index.json,
                        manifest.json}

Invariants
- It exists complete or not at all: it is written under another name, flushed and renamed.
- The manifest holds the SHA-256 of every shard, and one of itself: `read_manifest` raises on any
  difference in the manifest, `check_shard` on one in a shard.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors.torch import save

from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import writing
from megatron_async.weight_sync.transports.base import Bucket

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ShardRecord:
    """Entry of a manifest for one file."""

    sha256: str
    bytes: int


def shard_of(data: bytes) -> ShardRecord:
    """The entry of a file with this content."""
    return ShardRecord(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True)
class VersionManifest:
    """A published version. `owners` maps each tensor to the shard that holds it.

    Of differences (`delta.py`), `base` is the digest of the version that they are against, and
    `files` are the files of differences, named like the shard that each of them makes.
    """

    version: str
    shards: Mapping[str, ShardRecord]
    owners: Mapping[str, str]
    base: str | None = None
    files: Mapping[str, ShardRecord] | None = None

    @property
    def digest(self) -> str:
        """Identifies the weights, bit for bit: over all shards of the whole model."""
        return _sha256({name: shard.sha256 for name, shard in self.shards.items()})

    def to_json(self) -> bytes:
        """Serialize it, with a checksum of itself."""
        content = asdict(self)
        return json.dumps({**content, "sha256": _sha256(content)}, indent=1).encode()


def read_manifest(path: Path) -> VersionManifest:
    """The manifest of a published directory. Raises ComponentFailure if it is not as written."""
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        recorded = content.pop("sha256")
        if recorded != _sha256(content):
            raise ValueError("its checksum is not that of its content")
        return TypeAdapter(VersionManifest).validate_python(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ComponentFailure(
            f"published weights {path} have no readable manifest: {error!r}"
        ) from error


def read_shard(path: Path, name: str, expected: ShardRecord) -> bytes:
    """A shard's content. Raises ComponentFailure if it is not as written."""
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise ComponentFailure(f"published weights {path} lack {name}") from error
    if shard_of(data) != expected:
        raise ComponentFailure(f"published weights {path}: {name} is damaged")
    return data


class VersionWriter:
    """A directory in the making. Several stages' senders may write to the same one."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self._partial = directory / f".{name}.partial"
        self._partial.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, data: bytes) -> ShardRecord:
        """Write a file."""
        _write(self._partial / name, data)
        return shard_of(data)

    def finish(self, manifest: VersionManifest, *, index: bool = True) -> Path:
        """Index and manifest, then the rename; an older directory of the name is replaced.

        Files of an attempt that failed before are removed.
        """
        files = manifest.shards if manifest.files is None else manifest.files
        for path in self._partial.iterdir():
            if path.name not in files:
                path.unlink()
        if index:
            total = sum(shard.bytes for shard in manifest.shards.values())
            content = {"metadata": {"total_size": total}, "weight_map": dict(manifest.owners)}
            _write(self._partial / INDEX, json.dumps(content, indent=1).encode())
        _write(self._partial / MANIFEST, manifest.to_json())
        if self.path.exists():
            shutil.rmtree(self.path)
        self._partial.rename(self.path)
        return self.path

    def discard(self) -> None:
        """Remove what was written; does nothing after `finish`."""
        shutil.rmtree(self._partial, ignore_errors=True)


def serialize(bucket: Bucket) -> bytes:
    """A bucket as the content of a safetensors file."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in bucket})


def _write(path: Path, data: bytes) -> None:
    with writing(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

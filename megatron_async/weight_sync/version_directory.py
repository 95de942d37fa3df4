"""Writes and reads a directory with the weights of one policy version: safetensors files (shards),
an index of their tensors, and a manifest with checksums.

    <directory>/<name>/{model-00-00001.safetensors, ..., model.safetensors.index.json,
                        manifest.json}

Invariants
- The directory exists completely or not at all: it is written under another name, flushed and
  renamed.
- The manifest contains the SHA-256 of every shard and of its own content. `read_manifest` raises an
  error if the manifest was changed, and `read_shard` raises an error if the shard was changed.
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
    """Checksum and size of one file, as a manifest records them."""

    sha256: str
    bytes: int


def shard_of(data: bytes) -> ShardRecord:
    """Return the record of a file with the content `data`."""
    return ShardRecord(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True)
class VersionManifest:
    """Manifest of a published version.

    Attributes:
        version: The policy version.
        shards: Record of each shard of the complete version, by file name.
        owners: Name of the shard that contains each tensor.
        base: If the directory contains differences from another version (`delta.py`), the digest of
            that version; otherwise None.
        files: Records of the files with differences, by file name, if the directory contains
            differences; otherwise None. Such a file has the name of the shard that is computed from
            it.
    """

    version: str
    shards: Mapping[str, ShardRecord]
    owners: Mapping[str, str]
    base: str | None = None
    files: Mapping[str, ShardRecord] | None = None

    @property
    def digest(self) -> str:
        """Digest of the names and checksums of all shards. Two versions with the same digest have
        the same shards, bit for bit."""
        return _sha256({name: shard.sha256 for name, shard in self.shards.items()})

    def to_json(self) -> bytes:
        """Serialize the manifest, with a checksum of its own content."""
        content = asdict(self)
        return json.dumps({**content, "sha256": _sha256(content)}, indent=1).encode()


def read_manifest(path: Path) -> VersionManifest:
    """Read the manifest of the published directory `path`.

    Raises:
        ComponentFailure: If the manifest is missing or was changed.
    """
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        recorded = content.pop("sha256")
        if recorded != _sha256(content):
            raise ValueError("its checksum does not match its content")
        return TypeAdapter(VersionManifest).validate_python(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ComponentFailure(
            f"published weights {path} have no readable manifest: {error!r}"
        ) from error


def read_shard(path: Path, name: str, expected: ShardRecord) -> bytes:
    """Read the shard `name` of the published directory `path`.

    Raises:
        ComponentFailure: If the shard is missing or differs from its record `expected`.
    """
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise ComponentFailure(f"published weights {path} lack {name}") from error
    if shard_of(data) != expected:
        raise ComponentFailure(f"published weights {path}: {name} is damaged")
    return data


class VersionWriter:
    """Writes a version directory under a temporary name; `finish` gives it its final name. The
    senders of several pipeline stages may write files of the same directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self._partial = directory / f".{name}.partial"
        self._partial.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, data: bytes) -> ShardRecord:
        """Write the file `name` with the content `data`; return its record."""
        _write(self._partial / name, data)
        return shard_of(data)

    def finish(self, manifest: VersionManifest, *, index: bool = True) -> Path:
        """Write the index (if `index`) and the manifest, and rename the directory to its final
        name, replacing an older directory of that name. Return its path.

        Files that are not in the manifest, which an earlier failed attempt may have written, are
        removed before.
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
        """Remove the files that were written; do nothing after `finish`."""
        shutil.rmtree(self._partial, ignore_errors=True)


def serialize(bucket: Bucket) -> bytes:
    """Return the tensors of a bucket as the content of a safetensors file."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in bucket})


def _write(path: Path, data: bytes) -> None:
    with writing(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

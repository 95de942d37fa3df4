"""The manifest: what makes a directory of files a checkpoint, and the commit record of a run.

Invariants
- A directory `step_NNNNNN` is a checkpoint exactly when it holds `manifest.json` or its copy. It
  gets its name by one atomic rename after every file is complete and on disk: the commit
  (docs/semantics.md section 2).
- The manifest lists every file with its size and SHA-256, so that a torn, truncated or corrupted
  checkpoint is distinguished from a good one before anything is loaded.
- It lists every tensor with a checksum of what the trainer held (`checkpoint.checksum`), which does
  not depend on files or layout: what is loaded is compared with it, so that a save or a load that
  puts values into wrong places is found too.
- It has a checksum of its own content, since counters and the store's position are loaded too, and
  stands there twice: one that is damaged or lost is read from its copy.
- No damaged manifest is passed over in silence: what could be the newest commit is refused by name,
  since to go on before it would be to train the same trajectories again.
- A checkpoint of another format is refused by name, never passed over as a corrupt one.
- Checkpoints are ordered by (lineage, step): after a rollback the surviving lineage is newer,
  however far the abandoned one had come.
- Removal takes both manifests away first: what is half removed is no checkpoint.
- Only regular files inside the directory are opened, whatever name the manifest gives them.
"""

import hashlib
import json
import logging
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import msgspec

from megatron_async.errors import UserError
from megatron_async.files.disk import force_to_disk, replacing
from megatron_async.trajectory.types import PolicyVersion

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
COPY_NAME = "manifest.copy.json"
_BOTH = (COPY_NAME, MANIFEST_NAME)
FORMAT = 3
_QUICKLY_READ_BYTES = 2 << 30

# First parts of tensors' names: values, Adam's moments, Muon's momentum.
WEIGHTS, ADAM, MOMENTUM = "weights", ("exp_avg", "exp_avg_sq"), "momentum_buffer"


class CorruptCheckpoint(Exception):
    """A checkpoint directory that differs from its manifest; names the first fault."""


class OtherFormat(UserError):
    """A checkpoint that another version of this program has written."""


@dataclass(frozen=True)
class SavedLayout:
    """Ranks that wrote a checkpoint. Weights and optimizer state load at any other layout."""

    tensor: int
    pipeline: int
    data: int
    context: int = 1
    expert: int = 1


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hex) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """Precision, whole shape and checksum (16 hexadecimal digits) of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """`step` is the policy version of the weights: batches 0 to step - 1 are committed by it.

    `trainer` is the trainer's own state, `extra` the caller's (store position, seeds); both are
    JSON objects. `files` maps names relative to the directory, `tensors` the names of tensors.
    """

    lineage: int
    step: int
    layout: SavedLayout
    files: Mapping[str, FileRecord]
    trainer: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)

    @property
    def version(self) -> PolicyVersion:
        """(lineage, step)."""
        return PolicyVersion(self.lineage, self.step)

    @property
    def optimizer(self) -> str | None:
        """Name of the optimizer whose state it holds, adam or muon; None without tensors."""
        if not self.tensors:
            return None
        return "muon" if any(name.startswith(f"{MOMENTUM}/") for name in self.tensors) else "adam"

    def to_json(self) -> str:
        """Inverse of `from_json`. Raises TypeError when `extra` is not JSON-serializable."""
        content = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read what `to_json` writes; raises CorruptCheckpoint for anything else, OtherFormat."""
        try:
            content = json.loads(text)
            if (found := content["format"]) != FORMAT:
                raise OtherFormat(
                    f"it has format {found}, and this version of megatron_async reads format "
                    f"{FORMAT}; with the version that wrote it, go on with the run or convert the "
                    "weights (megatron-async convert megatron-to-hf) and start a run from them"
                )
            if content.pop("checksum") != _checksum(content):
                raise ValueError("its content does not have the checksum that it holds")
            return msgspec.convert(content, cls)
        except (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
            raise CorruptCheckpoint(f"{MANIFEST_NAME} cannot be read: {error}") from error


def _checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's own content, as JSON has it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A finalized checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The policy version of its weights."""
        return self.manifest.step


def step_directory(root: Path | str, step: int) -> Path:
    """Directory of the checkpoint of `step` below `root`, the run's `checkpoints/`."""
    return Path(root) / f"step_{step:06d}"


def is_checkpoint(path: Path) -> bool:
    """Return whether the directory was finalized: a manifest is there, damaged or not."""
    return any((path / name).exists() for name in _BOTH)


def file_in(folder: Path, name: str) -> Path:
    """The file that the checkpoint in `folder` calls `name`. Raises CorruptCheckpoint or OSError.

    Whoever wrote the checkpoint chose the name, and to open a pipe would wait for a writer.
    """
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or "\0" in name:
        raise CorruptCheckpoint(f"{name!r} is not a name inside the checkpoint")
    path = folder / place
    if not stat.S_ISREG(path.stat().st_mode):
        raise CorruptCheckpoint(f"{name} is no regular file")
    return path


def hash_file(path: Path) -> FileRecord:
    """Read a file once. Raises OSError."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(stream.tell(), digest)


def write_atomically(path: Path, content: bytes) -> None:
    """Content is complete and on disk before the name exists. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def finalize(temporary: Path, target: Path, manifest: Manifest) -> Checkpoint:
    """Turn a complete directory of files into the checkpoint `target`: the commit.

    A `target` that exists is an abandoned lineage's or a corrupt one; it is taken away first.
    Raises OSError, in which case `target` does not exist or is complete.
    """
    remove(target)
    for name in _BOTH:
        write_atomically(temporary / name, manifest.to_json().encode())
    temporary.rename(target)
    force_to_disk(target.parent)
    return Checkpoint(target, manifest)


def remove(path: Path) -> None:
    """Remove a checkpoint directory, manifests first. A missing one is no error."""
    if not path.exists():
        return
    for name in _BOTH:
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(path)


def faults(path: Path, files: Mapping[str, FileRecord], *, read: bool = True) -> list[str]:
    """Return a sentence for each fault of these files of the checkpoint at `path`.

    Unless they are `read`, those of their sizes only.
    """
    found = []
    for name, record in sorted(files.items()):
        try:
            file = file_in(path, name)
            size = file.stat().st_size
            if size != record.size:
                found.append(f"{name} has {size} bytes, by its manifest {record.size}")
            elif read and hash_file(file).sha256 != record.sha256:
                found.append(f"{name} does not have the checksum of its manifest")
        except CorruptCheckpoint as error:
            found.append(str(error))
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
    return found


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check a manifest, but not the files. Raises CorruptCheckpoint, OtherFormat."""
    try:
        return _read(path, MANIFEST_NAME)
    except (CorruptCheckpoint, OtherFormat) as error:  # the damage may be in the format's number
        if not (path / COPY_NAME).exists():
            raise
        logger.warning("checkpoint %s: %s; its copy is used", path, error)
        return _read(path, COPY_NAME)


def _read(path: Path, name: str) -> Checkpoint:
    try:
        return Checkpoint(path, Manifest.from_json(file_in(path, name).read_text()))
    except OtherFormat as error:
        raise OtherFormat(f"checkpoint {path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{name} cannot be read: {error}") from error


def list_checkpoints(root: Path | str) -> list[Checkpoint]:
    """Finalized checkpoints, newest first by (lineage, step). Unreadable ones are reported.

    Raises OtherFormat: to pass over what another version wrote would be to start afresh.
    """
    found, damaged = _scan(root)
    for path, reason in damaged.items():
        logger.warning("checkpoint %s is corrupt and is ignored: %s", path, reason)
    return found


def damaged_after(root: Path | str, step: int) -> dict[Path, str]:
    """Checkpoints of later steps whose manifest cannot be read, newest first, with the reason."""
    return {
        path: reason
        for path, reason in reversed(_scan(root)[1].items())
        if path.name > step_directory(root, step).name
    }


def check_manifests(root: Path | str) -> None:
    """Refuse to go on where the newest commit may be a manifest that is damaged. Raises UserError.

    What was never finalized (its writer was killed) has no manifest and is no commit.
    """
    kept = [checkpoint.step for checkpoint in _scan(root)[0]]
    for path, reason in damaged_after(root, max(kept, default=-1)).items():
        remedy = (
            f"go on from an older checkpoint by --from-step (kept: {', '.join(map(str, kept))}), "
            "which sets this one aside"
            if kept
            else "no other is kept"
        )
        raise UserError(
            f"checkpoint {path} is damaged: {reason}; restore the file, or {remedy}, or start a "
            "new run under another name"
        )


def _scan(root: Path | str) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Checkpoints, newest first, and those whose manifest cannot be read, oldest first."""
    found, damaged = [], {}
    for path in sorted(Path(root).glob("step_*")) if Path(root).is_dir() else []:
        if not is_checkpoint(path):
            logger.warning("checkpoint %s was never finalized and is ignored", path)
            continue
        try:
            found.append(read_checkpoint(path))
        except CorruptCheckpoint as error:
            damaged[path] = str(error)
    found.sort(key=lambda checkpoint: checkpoint.manifest.version, reverse=True)
    return found, damaged


def all_faults(checkpoint: Checkpoint) -> list[str]:
    """Return a sentence for each fault of a checkpoint's files."""
    return faults(checkpoint.path, checkpoint.manifest.files)


def quickly_read(checkpoint: Checkpoint) -> bool:
    """Return whether its files are read in a few seconds."""
    whole = sum(record.size for record in checkpoint.manifest.files.values())
    return whole <= _QUICKLY_READ_BYTES


def quick_faults(checkpoint: Checkpoint) -> list[str]:
    """All faults of files that are `quickly_read`; of larger ones those of their sizes."""
    return faults(checkpoint.path, checkpoint.manifest.files, read=quickly_read(checkpoint))


FindFaults: TypeAlias = Callable[[Checkpoint], list[str]]


def first_intact(
    checkpoints: Iterable[Checkpoint], find_faults: FindFaults = all_faults
) -> Checkpoint | None:
    """Return the first checkpoint whose files match its manifest; others are reported."""
    for checkpoint in checkpoints:
        problems = find_faults(checkpoint)
        if not problems:
            return checkpoint
        logger.warning(
            "checkpoint %s is corrupt (%s); the previous one is used", checkpoint.path, problems[0]
        )
    return None


def find_latest(root: Path | str) -> Checkpoint | None:
    """The newest intact checkpoint in `root`, every file verified; None when there is none."""
    return first_intact(list_checkpoints(root))


def open_checkpoint(
    path: Path | str, named_by: str = "checkpoint", find_faults: FindFaults = all_faults
) -> Checkpoint:
    """A checkpoint that a person named. Raises UserError when it is missing or corrupt."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{named_by} {path} does not exist")
    try:
        checkpoint = read_checkpoint(path)
    except CorruptCheckpoint as error:
        raise UserError(f"{named_by} {path} is not complete: {error}") from error
    if problems := find_faults(checkpoint):
        raise UserError(f"{named_by} {path} is corrupt: {problems[0]}")
    return checkpoint


def prune(root: Path | str, keep: int) -> None:
    """Remove all but the `keep` newest finalized checkpoints."""
    for checkpoint in list_checkpoints(root)[keep:]:
        remove(checkpoint.path)

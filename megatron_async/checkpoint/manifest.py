"""Reads and writes manifests. The manifest is the file that makes a directory a checkpoint, and a
checkpoint commits the training up to its step.

Invariants
- A directory `step_NNNNNN` is a checkpoint exactly when it contains `manifest.json` or its copy.
  The directory gets this name by one atomic rename, after every file is complete and on disk. This
  rename is the commit (docs/semantics.md section 2).
- The manifest lists every file with its size and SHA-256, so that a torn, truncated or corrupted
  checkpoint is distinguished from a good one before anything is loaded.
- The manifest lists every tensor with a checksum of the trainer's values (`checkpoint.checksum`),
  which does not depend on files or layout. Loaded values are compared with it, so that a defect of
  saving or loading that puts values at wrong indices is detected too.
- The manifest has a checksum of its own content, because the trainer's counters and the position in
  the trajectory store are loaded from it. It is stored twice: a damaged or lost manifest is read
  from its copy.
- No damaged manifest is ignored silently. If a damaged manifest could belong to the newest
  checkpoint, an error names it, because a run that continued from an earlier checkpoint would train
  on the same trajectories again.
- For a checkpoint whose format has another version, an error names it; it is never ignored as
  corrupt.
- Checkpoints are ordered by (lineage, step). A lineage is a number that grows by one at every
  resume. So after a resume from an earlier checkpoint, new checkpoints count as newer than those of
  the abandoned lineage, even if these have larger steps.
- Removal deletes both manifests first, so that a partly removed directory is not a checkpoint.
- Only regular files inside the directory are opened, whatever names the manifest contains.
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
_MANIFESTS = (COPY_NAME, MANIFEST_NAME)
FORMAT = 3
_QUICKLY_READ_BYTES = 2 << 30

# Prefixes of the names of tensors in a checkpoint: the parameters' values, Adam's two moments, and
# Muon's momentum.
WEIGHTS, ADAM, MOMENTUM = "weights", ("exp_avg", "exp_avg_sq"), "momentum_buffer"


class CorruptCheckpoint(Exception):
    """Error for a checkpoint that does not match its manifest or cannot be read; the message
    describes the first fault."""


class OtherFormat(UserError):
    """Error for a checkpoint that was written by a version of this program with another checkpoint
    format."""


@dataclass(frozen=True)
class SavedLayout:
    """Sizes of the parallel dimensions of the trainer that wrote a checkpoint.

    Weights and optimizer state load at any other layout too.
    """

    tensor: int
    pipeline: int
    data: int
    context: int = 1
    expert: int = 1


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of one file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """Precision, whole shape and checksum (16 hexadecimal digits) of one tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint's manifest: a list of the files and tensors, and the progress of the
    training.

    Attributes:
        lineage: Lineage of the run that saved it (a number that grows by one at every resume).
        step: Policy number of the weights, which were trained on the batches 0 to step - 1.
        layout: Sizes of the parallel dimensions of the trainer that wrote it.
        files: Records of the files, by their names relative to the checkpoint's directory.
        trainer: State of the trainer other than tensors, such as counters, as a JSON object.
        extra: State of the caller of the save, as a JSON object: in a run, the position in the
            trajectory store; for a converted checkpoint, the directory from which it was converted.
        tensors: Records of the tensors, by their names.
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
        """Policy version of the checkpoint's weights: lineage and step."""
        return PolicyVersion(self.lineage, self.step)

    @property
    def optimizer(self) -> str | None:
        """Name of the optimizer whose state the checkpoint contains, adam or muon; None if the
        manifest lists no tensors. It is adam also for a checkpoint with only weights."""
        if not self.tensors:
            return None
        return "muon" if any(name.startswith(f"{MOMENTUM}/") for name in self.tensors) else "adam"

    def to_json(self) -> str:
        """Return the manifest as JSON text with its format number and a checksum of its content.

        Raises:
            TypeError: If `extra` or `trainer` is not JSON-serializable.
        """
        content = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse the JSON text that `to_json` writes.

        Raises:
            OtherFormat: If the text has another format number than this version of the program
                writes.
            CorruptCheckpoint: If the text is not a manifest or does not match its checksum.
        """
        try:
            content = json.loads(text)
            if (found := content["format"]) != FORMAT:
                raise OtherFormat(
                    f"it has format {found}, and this version of megatron_async reads format "
                    f"{FORMAT}; with the version that wrote it, continue the run, or convert its "
                    "weights (megatron-async convert megatron-to-hf) and start a run from them"
                )
            if content.pop("checksum") != _checksum(content):
                raise ValueError("its content does not match the checksum stored in it")
            return msgspec.convert(content, cls)
        except (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
            raise CorruptCheckpoint(f"{MANIFEST_NAME} cannot be read: {error}") from error


def _checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A finalized checkpoint on disk: its directory and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Policy number of the checkpoint's weights."""
        return self.manifest.step


def step_directory(root: Path | str, step: int) -> Path:
    """Return the directory of the checkpoint of `step` below `root`, the run's `checkpoints/`."""
    return Path(root) / f"step_{step:06d}"


def is_checkpoint(path: Path) -> bool:
    """Return whether the directory at `path` is a finalized checkpoint, which has a manifest or its
    copy, even if damaged."""
    return any((path / name).exists() for name in _MANIFESTS)


def file_in(folder: Path, name: str) -> Path:
    """Return the path of file `name` of the checkpoint in `folder`, after a check that the file is
    safe to open.

    The name comes from the checkpoint, which anyone may have made. A name could lead out of the
    folder, or belong to a pipe, where opening would wait forever.

    Raises:
        CorruptCheckpoint: If the name leads out of the folder, or does not belong to a regular
            file.
        OSError: If the file does not exist or is inaccessible.
    """
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise CorruptCheckpoint(f"{name!r} is not a name inside the checkpoint")
    path = folder / relative
    if not stat.S_ISREG(path.stat().st_mode):
        raise CorruptCheckpoint(f"{name} is not a regular file")
    return path


def hash_file(path: Path) -> FileRecord:
    """Read the file at `path`; return its size and SHA-256.

    Raises:
        OSError: If the file cannot be read.
    """
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(stream.tell(), digest)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it gets the name `path` only when its content is complete and on disk.

    Raises:
        OSError: If the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def finalize(temporary: Path, target: Path, manifest: Manifest) -> Checkpoint:
    """Commit a complete directory of files: write its manifests and rename it to `target`.

    If `target` exists, it belongs to an abandoned lineage or is corrupt, and it is removed first.

    Raises:
        OSError: If an operation fails; `target` then either is not a checkpoint or is complete.
    """
    remove(target)
    for name in _MANIFESTS:
        write_atomically(temporary / name, manifest.to_json().encode())
    temporary.rename(target)
    force_to_disk(target.parent)
    return Checkpoint(target, manifest)


def remove(path: Path) -> None:
    """Remove a checkpoint directory; do nothing if it does not exist. The manifests are removed
    first, so that a partly removed directory is not a checkpoint."""
    if not path.exists():
        return
    for name in _MANIFESTS:
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(path)


def faults(path: Path, files: Mapping[str, FileRecord], *, read: bool = True) -> list[str]:
    """Check `files` of the checkpoint at `path`; return a message for each fault that is found.

    Args:
        path: The checkpoint directory.
        files: Names and records of the files to check.
        read: Whether the files are read and hashed; otherwise only their sizes are compared.
    """
    found = []
    for name, record in sorted(files.items()):
        try:
            file = file_in(path, name)
            size = file.stat().st_size
            if size != record.size:
                found.append(f"{name} has {size} bytes; the manifest says {record.size}")
            elif read and hash_file(file).sha256 != record.sha256:
                found.append(f"{name} does not match its checksum in the manifest")
        except CorruptCheckpoint as error:
            found.append(str(error))
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
    return found


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check the manifest of the checkpoint at `path`, but not its files.

    If the manifest is damaged, its copy is read.

    Raises:
        CorruptCheckpoint: If both the manifest and its copy are damaged or missing.
        OtherFormat: If the checkpoint has the format of another version of this program.
    """
    try:
        return _read(path, MANIFEST_NAME)
    # A wrong format number may be due to damage too, so read the copy also in this case.
    except (CorruptCheckpoint, OtherFormat) as error:
        if not (path / COPY_NAME).exists():
            raise
        logger.warning(
            "checkpoint %s: reading the copy of its manifest, because of: %s", path, error
        )
        return _read(path, COPY_NAME)


def _read(path: Path, name: str) -> Checkpoint:
    """Read the manifest from file `name` of the checkpoint directory at `path`.

    Raises:
        CorruptCheckpoint: If the file is damaged or missing.
        OtherFormat: If the checkpoint has the format of another version of this program.
    """
    try:
        return Checkpoint(path, Manifest.from_json(file_in(path, name).read_text()))
    except OtherFormat as error:
        raise OtherFormat(f"checkpoint {path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{name} cannot be read: {error}") from error


def list_checkpoints(root: Path | str) -> list[Checkpoint]:
    """Return the finalized checkpoints below `root`, newest first by (lineage, step).

    Checkpoints with unreadable manifests are logged and left out.

    Raises:
        OtherFormat: If a checkpoint has the format of another version of this program. If it were
            ignored, the run would start again from an earlier checkpoint or from the beginning.
    """
    found, damaged = _scan(root)
    for path, reason in damaged.items():
        logger.warning("checkpoint %s is corrupt and is ignored: %s", path, reason)
    return found


def damaged_after(root: Path | str, step: int) -> dict[Path, str]:
    """Return the directories of the checkpoints after `step` whose manifests cannot be read, newest
    first, each with the reason."""
    return {
        path: reason
        for path, reason in reversed(_scan(root)[1].items())
        if path.name > step_directory(root, step).name
    }


def check_manifests(root: Path | str) -> None:
    """Raise UserError if a checkpoint below `root` has a damaged manifest and a larger step than
    every readable checkpoint.

    Such a checkpoint may be the newest. A directory without a manifest, whose writer was killed
    before it had finished, is ignored.
    """
    kept = [checkpoint.step for checkpoint in _scan(root)[0]]
    for path, reason in damaged_after(root, max(kept, default=-1)).items():
        remedy = (
            ", or go back to an older checkpoint with --from-step (available: "
            f"{', '.join(map(str, kept))}), which sets the damaged checkpoint aside"
            if kept
            else " (no other checkpoint exists)"
        )
        raise UserError(
            f"checkpoint {path} is damaged: {reason}. Restore the file{remedy}, or start a new run "
            "under another name"
        )


def _scan(root: Path | str) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Read all manifests below `root`.

    Returns:
        The checkpoints, newest first; and a dict from each directory whose manifest cannot be read
        to the reason, smallest step first.
    """
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
    """Read all files of a checkpoint; return a message for each fault."""
    return faults(checkpoint.path, checkpoint.manifest.files)


def is_quickly_readable(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint's files are small enough to be read in a few seconds."""
    size = sum(record.size for record in checkpoint.manifest.files.values())
    return size <= _QUICKLY_READ_BYTES


def quick_faults(checkpoint: Checkpoint) -> list[str]:
    """Return a message for each fault of a checkpoint's files that can be found within a few
    seconds.

    Files of a large checkpoint are not read; only their sizes are compared.
    """
    return faults(checkpoint.path, checkpoint.manifest.files, read=is_quickly_readable(checkpoint))


FindFaults: TypeAlias = Callable[[Checkpoint], list[str]]


def first_intact(
    checkpoints: Iterable[Checkpoint], find_faults: FindFaults = all_faults
) -> Checkpoint | None:
    """Return the first checkpoint in which `find_faults` finds no faults; None if there is none.
    Log the checkpoints with faults before it."""
    for checkpoint in checkpoints:
        problems = find_faults(checkpoint)
        if not problems:
            return checkpoint
        logger.warning(
            "checkpoint %s is corrupt (%s); trying the previous one", checkpoint.path, problems[0]
        )
    return None


def find_latest(root: Path | str) -> Checkpoint | None:
    """Return the newest checkpoint below `root` whose files are all intact; None if there is
    none."""
    return first_intact(list_checkpoints(root))


def open_checkpoint(
    path: Path | str, named_by: str = "checkpoint", find_faults: FindFaults = all_faults
) -> Checkpoint:
    """Read the manifest of the checkpoint at `path`, which a user has named, and check its files.

    Args:
        path: The checkpoint directory.
        named_by: The setting or option that named it, for the error message.
        find_faults: Function that checks the files; by default all are read.

    Raises:
        UserError: If the checkpoint is missing, incomplete or corrupt.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{named_by} {path} does not exist")
    try:
        checkpoint = read_checkpoint(path)
    except CorruptCheckpoint as error:
        raise UserError(f"{named_by} {path} has no readable manifest: {error}") from error
    if problems := find_faults(checkpoint):
        raise UserError(f"{named_by} {path} is corrupt: {problems[0]}")
    return checkpoint


def prune(root: Path | str, keep: int) -> None:
    """Remove all but the `keep` newest finalized checkpoints below `root`."""
    for checkpoint in list_checkpoints(root)[keep:]:
        remove(checkpoint.path)

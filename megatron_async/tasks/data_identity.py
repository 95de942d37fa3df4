"""Detects data files that changed between the start of a run and its resume.

A resumed run must read the same rows as at its start. With other rows, the position that the run
has saved would point to another problem, problems that were trained on might now be held out for
evaluation, and numbers measured on an evaluation set could not be compared.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from megatron_async.config.run import RunConfig
from megatron_async.errors import UserError
from megatron_async.tasks.rows import data_files

Identity: TypeAlias = "dict[str, dict[str, Any]]"
"""For each setting that names data: its `path` and `split`, and for each file its `size`, the inode
change time `changed_ns` in nanoseconds, and the `digest` of its content.
"""


def data_identity(config: RunConfig, known: Mapping[str, Any] | None = None) -> Identity:
    """Return paths, sizes, change times and content hashes of the run's data files, by setting.

    These are the files with training prompts (`task.path` or `task.sources`) and those of the
    evaluation sets.

    Args:
        config: The run's settings.
        known: An earlier result of this function. A file whose size and inode change time are as in
            that result is not read again; the earlier hash is returned.

    Raises:
        UserError: If a file cannot be read.
    """
    found: Identity = {}
    for setting, path, split in _sources(config):
        root = Path(path).absolute()
        before = (known or {}).get(setting, {}).get("files", {})
        try:
            files = {
                file.name if file == root else str(file.relative_to(root)): file
                for file in map(Path.absolute, data_files(path, split, setting))
            }
            states = {name: _state(file, before.get(name, {})) for name, file in files.items()}
        except OSError as error:
            raise UserError(f"{setting} {path!r} cannot be read: {error}") from error
        found[setting] = {"path": path, "split": split, "files": states}
    return found


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one description for each setting whose data files have another content than before.

    A setting whose own `path` or `split` has changed is skipped.

    Args:
        before: Result of `data_identity` from the start of the run.
        now: Result of `data_identity` now.
    """
    changes = []
    for setting, was in before.items():
        is_now = now.get(setting)
        if is_now is None or any(is_now[name] != was[name] for name in ("path", "split")):
            continue  # The resume compares settings itself and reports this change.
        old, new = ({n: f["digest"] for n, f in s["files"].items()} for s in (was, is_now))
        kinds = {
            "changed": [name for name in old.keys() & new.keys() if old[name] != new[name]],
            "missing": old.keys() - new.keys(),
            "added": new.keys() - old.keys(),
        }
        parts = [f"{kind} {', '.join(sorted(names)[:3])}" for kind, names in kinds.items() if names]
        if parts:
            changes.append(f"{setting} {was['path']}: {'; '.join(parts)}")
    return changes


def _sources(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield setting, path and split of each training file and evaluation set that the run reads."""
    name = "task.path" if config.task.path else "task.sources"
    files = config.task.files() if config.task.kind == "files" else ()
    for number, source in enumerate(files):
        yield f"{name}[{number}]" if config.task.sources else name, source.path, source.split
    for setting, file in config.eval.files().values():
        yield setting, file.path, file.split


def _state(file: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size, change time and content hash of `file`; reuse `before` if it is unchanged.

    The file counts as unchanged if its size and inode change time equal those in `before`.
    """
    stat = file.stat()
    state: dict[str, Any] = {"size": stat.st_size, "changed_ns": stat.st_ctime_ns}
    if state.items() <= before.items():
        return dict(before)
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16))
    return {**state, "digest": digest.hexdigest()}

"""Identity of a run's data files: a run goes on with the rows that it began with.

A position in the data, the side of a problem and a number measured on an evaluation set mean
something else once a file has changed.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from megatron_async.config.run import RunConfig
from megatron_async.errors import UserError
from megatron_async.tasks.rows import data_files

Identity: TypeAlias = "dict[str, dict[str, Any]]"
"""By setting: `path` and `split` as set, and by file `size`, `changed_ns` and `digest`."""


def data_identity(config: RunConfig, known: Mapping[str, Any] | None = None) -> Identity:
    """Return the identity of the files with prompts and evaluation problems.

    The content of a file that has the size and the inode change time of `known` is not read again.
    Raises UserError for a file that cannot be read.
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
    """Return a description of each setting whose path is the same and whose content is not."""
    changes = []
    for setting, was in before.items():
        is_now = now.get(setting)
        if is_now is None or any(is_now[name] != was[name] for name in ("path", "split")):
            continue  # the setting itself has changed, which a resume shows
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
    """Yield the setting, the path and the split of each source of rows."""
    name = "task.path" if config.task.path else "task.sources"
    files = config.task.files() if config.task.kind == "files" else ()
    for number, source in enumerate(files):
        yield f"{name}[{number}]" if config.task.sources else name, source.path, source.split
    for setting, file in config.eval.files().values():
        yield setting, file.path, file.split


def _state(file: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    stat = file.stat()
    state: dict[str, Any] = {"size": stat.st_size, "changed_ns": stat.st_ctime_ns}
    if state.items() <= before.items():
        return dict(before)
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16))
    return {**state, "digest": digest.hexdigest()}

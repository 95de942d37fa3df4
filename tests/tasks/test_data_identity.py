"""Tests that changed data files are detected by their content, not by location or time."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.tasks import data_identity as module
from megatron_async.tasks.data_identity import data_changes, data_identity


def rows(file: Path, count: int) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "".join(json.dumps({"prompt": f"{i}", "answer": 1}) + "\n" for i in range(count))
    )
    return str(file)


def config_of(folder: Path, **sections: Any) -> RunConfig:
    task = {"path": rows(folder / "train.jsonl", 9), "name": "exact"}
    return build_config({"task": task, **sections})


def test_data_changes_is_empty_when_only_inode_and_time_change(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    before = data_identity(config)
    file = tmp_path / "train.jsonl"
    shutil.copy(file, tmp_path / "copy")
    (tmp_path / "copy").replace(file)
    os.utime(file, (1, 1))
    assert data_changes(before, data_identity(config, before)) == []


def test_data_changes_reports_content_change_that_keeps_size_and_mtime(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    before = data_identity(config)
    file = tmp_path / "train.jsonl"
    stat = file.stat()
    file.write_text(file.read_text().replace('"8"', '"7"'))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert data_changes(before, data_identity(config, before)) == [
        f"task.path {file}: changed train.jsonl"
    ]


def test_data_identity_does_not_read_a_file_when_it_is_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    before = data_identity(config)
    monkeypatch.setattr(module.hashlib, "file_digest", lambda *_: pytest.fail("it was read"))
    assert data_identity(config, before) == before


@pytest.mark.parametrize("change", ["changed", "missing", "added"])
def test_data_changes_reports_each_file_of_a_directory(tmp_path: Path, change: str) -> None:
    for name in ("a", "b"):
        rows(tmp_path / "data" / f"{name}" / "train.jsonl", 5)
    config = build_config({"task": {"path": str(tmp_path / "data"), "name": "exact"}})
    before = data_identity(config)
    names = {"changed": "b/train.jsonl", "missing": "b/train.jsonl", "added": "c/train.jsonl"}
    file = tmp_path / "data" / names[change]
    file.unlink() if change == "missing" else rows(file, 6)
    (found,) = data_changes(before, data_identity(config, before))
    assert found == f"task.path {tmp_path / 'data'}: {change} {names[change]}"


def test_data_identity_covers_sources_and_eval_sets_but_not_sft_data(tmp_path: Path) -> None:
    sources = [{"path": rows(tmp_path / f"{name}.jsonl", 5)} for name in "ab"]
    sets = {"hard": {"path": rows(tmp_path / "hard.jsonl", 5)}}
    sections = {
        "task": {"sources": sources, "name": "exact", "heldout_share": 0},
        "eval": {"sets": sets},
        "sft": {"data": rows(tmp_path / "sft.jsonl", 5)},
    }
    config = build_config(sections)
    before = data_identity(config)
    for name in ("b", "hard", "sft"):
        rows(tmp_path / f"{name}.jsonl", 6)
    found = data_changes(before, data_identity(config, before))
    assert sorted(one.split()[0] for one in found) == [
        "eval.sets.hard.path",
        "task.sources[1]",
    ]


def test_data_identity_resolves_relative_path_in_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config({"task": {"path": "train.jsonl", "name": "exact"}})
    for name, count in (("here", 5), ("there", 6), ("same", 5)):
        rows(tmp_path / name / "train.jsonl", count)
    monkeypatch.chdir(tmp_path / "here")
    before = data_identity(config)
    monkeypatch.chdir(tmp_path / "there")
    assert data_changes(before, data_identity(config, before))
    monkeypatch.chdir(tmp_path / "same")
    assert not data_changes(before, data_identity(config, before))


def test_data_changes_is_empty_when_only_the_split_setting_changes(tmp_path: Path) -> None:
    for name in ("train", "test"):
        rows(tmp_path / "data" / f"{name}.jsonl", 5)
    task = {"path": str(tmp_path / "data"), "name": "exact"}
    before = data_identity(build_config({"task": {**task, "split": "train"}}))
    now = data_identity(build_config({"task": {**task, "split": "test"}}), before)
    assert data_changes(before, now) == []


def test_data_identity_is_empty_when_task_has_no_files(tmp_path: Path) -> None:
    assert data_identity(build_config({})) == {}

"""Names of record files: never one twice, in the order of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.scheduler.record_files import record_key, unused_record


def test_every_record_of_a_line_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = []
    for lineage in (0, 3, 3, 3):
        path = unused_record(tmp_path, lineage)
        path.touch()
        names.append(path.name)
    assert names == ["0.jsonl", "3.jsonl", "3.1.jsonl", "3.2.jsonl"]
    assert [record_key(tmp_path / name) for name in names] == [(0, 0), (3, 0), (3, 1), (3, 2)]


@pytest.mark.parametrize("name", ["notes.jsonl", "3.old.jsonl", "3.1.2.jsonl", ".jsonl"])
def test_other_files_are_no_records(name: str) -> None:
    assert record_key(Path(name)) is None

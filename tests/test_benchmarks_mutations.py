"""The mutation check names places and tests that exist: it cannot pass by changing nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mutations.__main__ import MUTATIONS
from benchmarks.mutations.mutation import ROOT, Check
from benchmarks.mutations.runner import outcome_of


def test_every_mutation_changes_one_place() -> None:
    found = {m.name: (ROOT / m.file).read_text().count(m.before) for m in MUTATIONS}
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert not [mutation.name for mutation in MUTATIONS if mutation.before == mutation.after]


def test_every_mutation_has_tests_that_are_there() -> None:
    assert all(mutation.check.tests for mutation in MUTATIONS)
    tests = {name for mutation in MUTATIONS for name in mutation.check.tests}
    assert [name for name in tests if not (ROOT / "tests" / name).is_file()] == []


def test_names_are_different() -> None:
    names = Counter((mutation.name, mutation.file) for mutation in MUTATIONS)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("pass", "survived"),
        ("assert 1 == 2", "killed"),
        ("import time; time.sleep(60)", "hung"),
        ("import os; os._exit(3)", "broken"),
    ],
)
def test_how_tests_of_their_own_process_end_is_the_result(
    tmp_path: Path, body: str, result: str
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    limit_seconds = 5.0 if result == "hung" else 60.0
    found = outcome_of(tmp_path, Check(("test_it.py",), "", limit_seconds, apart=True))
    assert found.result == result, found.output
    if result == "killed":
        assert (found.noticed, found.why) == ("test_it.py::test_it", "assert 1 == 2")

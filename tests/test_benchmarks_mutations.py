"""The mutation check names places that exist: it cannot pass by changing nothing."""

from __future__ import annotations

from pathlib import Path

from benchmarks.mutations import MUTATIONS

ROOT = Path(__file__).parents[1]


def test_every_mutation_changes_one_place() -> None:
    found = {m.name: m.file(ROOT).read_text().count(m.before) for m in MUTATIONS}
    assert {name: count for name, count in found.items() if count != 1} == {}

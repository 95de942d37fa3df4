"""The command in a result file: what the run was, not where its file went."""

from __future__ import annotations

import sys

import pytest

from benchmarks.command import command_line


@pytest.mark.parametrize(
    "given",
    [
        ["--steps", "8", "--out", "/somewhere/else.md", "--lmdb"],
        ["--out=/somewhere/else.md", "--steps", "8", "--lmdb"],
        ["--steps", "8", "--lmdb", "--out", "/somewhere/else.md"],
    ],
)
def test_the_result_file_is_left_out(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/store.py", *given])
    assert command_line("benchmarks.store") == "python -m benchmarks.store --steps 8 --lmdb"


def test_what_a_shell_would_read_otherwise_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--name", "two words"])
    assert command_line("benchmarks.store") == "python -m benchmarks.store --name 'two words'"

"""A mutation, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Check:
    """Tests, as paths below `tests/`; `keyword` is pytest's `-k`.

    `apart`: in a process of their own, slow ones too. It is for tests that start ranks, Ray or
    servers; a child forked from a process with torch is quicker and can do none of these.
    """

    tests: tuple[str, ...]
    keyword: str = ""
    limit_seconds: float = 180.0
    apart: bool = False


@dataclass(frozen=True)
class Mutation:
    """One change: `before` occurs exactly once in `file` and becomes `after`.

    `file` is a path below the repository. `name` is what is printed.
    """

    name: str
    file: str
    before: str
    after: str
    check: Check


def apart(*tests: str, keyword: str = "", limit_seconds: float = 240.0) -> Check:
    """Return a check in a process of its own."""
    return Check(tests, keyword, limit_seconds, apart=True)


def taken_back(
    point: str, check: Check, file: str, *changes: tuple[str, str, str]
) -> tuple[Mutation, ...]:
    """Return changes of one file, each with what is wrong then and the text before and after.

    `point`: where an issue lists what was mended.
    """
    return tuple(
        Mutation(f"{point} {what}", file, before, after, check) for what, before, after in changes
    )

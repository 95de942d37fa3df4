"""Episodes and what their environments have written down. Pure.

Invariants
- The witness is the environment's own file (`noted_environment.py`): a call that it got is in there
  whatever became of the worker, the manager or the run.
- An episode is known by its name, which its environment draws anew whenever it begins; an agent's
  is its seed and its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.crash.noted_environment import OPENING

MADE_UP = "Yes."  # what is played before a run starts
ENDED = ("finished", "scored", "batched")


@dataclass(frozen=True)
class Call:
    """A call that an environment got."""

    what: str
    name: str
    seed: int
    turn: int = 0
    text: str = ""


@dataclass(frozen=True)
class Episode:
    """One that a store or its export holds: its name, and the policy's answer in each turn."""

    trajectory_id: int
    name: str
    seed: int
    answers: tuple[str, ...]
    state: str
    drop_reason: str | None = None


def name_of(opening: Sequence[Mapping[str, Any]]) -> str:
    """The name that an episode's environment has drawn, from its first messages; "": none."""
    for message in opening:
        if str(message["content"]).startswith(OPENING):
            return str(message["content"])[len(OPENING) :]
    return ""


def calls_of(lines: Iterable[Mapping[str, Any]]) -> list[Call]:
    """The calls in the order in which they came."""
    return [Call(**line) for line in lines]


def times_given(calls: Sequence[Call]) -> Counter[tuple[str, int]]:
    """How often each answer, by the episode's name and its turn, reached an environment."""
    return Counter((call.name, call.turn) for call in calls if call.what == "step")


def repeats(calls: Sequence[Call]) -> int:
    """Answers that came again, of all episodes."""
    return sum(count - 1 for count in times_given(calls).values())


def went_on(open_at: Sequence[frozenset[str]], episodes: Mapping[str, Episode]) -> tuple[int, int]:
    """Of the episodes that were open at kills: how many went on as they were, and how many.

    One goes on as it was if the store has it under the name with which it began. One that is
    dropped by a rule of the schedule has not begun again; one whose environment failed has.
    """
    kept = {name for name, one in episodes.items() if one.drop_reason != "environment"}
    return sum(len(names & kept) for names in open_at), sum(map(len, open_at))

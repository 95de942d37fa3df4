"""Promises about episodes, checked on what their environments have written down. Pure.

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


def actions_not_stored(
    calls: Sequence[Call], episodes: Mapping[str, Episode], anew: int = 0
) -> list[str]:
    """Every answer that an environment saw is stored under its turn.

    Evaluations have rows that training never sees; what is played before a start has made-up
    answers; `anew` episodes may have begun again, by faults that cost one each.
    """
    trained = {episode.seed for episode in episodes.values()}
    wrong, gone = [], set[str]()
    for call in calls:
        if call.what != "step" or call.seed not in trained:
            continue
        episode = episodes.get(call.name)
        if episode is None and call.text == MADE_UP:
            continue
        if episode is None and len(gone | {call.name}) <= anew:
            gone.add(call.name)
        elif episode is None:
            wrong.append(
                f"environment {call.name} of seed {call.seed} got an answer, and is not stored"
            )
        elif call.turn >= len(episode.answers):
            wrong.append(
                f"trajectory {episode.trajectory_id}: its environment got an answer in turn "
                f"{call.turn}, and {len(episode.answers)} are stored"
            )
        elif episode.answers[call.turn] != call.text:
            wrong.append(
                f"trajectory {episode.trajectory_id}: its environment got {call.text!r} in turn "
                f"{call.turn}, and {episode.answers[call.turn]!r} is stored"
            )
    return wrong


def answers_not_given(calls: Sequence[Call], episodes: Mapping[str, Episode]) -> list[str]:
    """Every stored answer of an episode that has ended by itself was seen by its environment."""
    given = {(call.name, call.turn, call.text) for call in calls if call.what == "step"}
    return [
        f"trajectory {one.trajectory_id} has the answer {text!r} in turn {turn}, and its "
        "environment never got it"
        for one in episodes.values()
        if one.state in ENDED
        for turn, text in enumerate(one.answers)
        if (one.name, turn, text) not in given
    ]


def repeated_too_often(calls: Sequence[Call], lives: int) -> list[str]:
    """An environment gets an answer once, and once more for each life at most."""
    counts = Counter((call.name, call.turn) for call in calls if call.what == "step")
    return [
        f"environment {name} got the answer of turn {turn} {count} times in {lives} lives"
        for (name, turn), count in counts.items()
        if count > lives
    ]


def repeats(calls: Sequence[Call]) -> int:
    """Answers that came again, of all episodes."""
    counts = Counter((call.name, call.turn) for call in calls if call.what == "step")
    return sum(count - 1 for count in counts.values())


def went_on(open_at: Sequence[frozenset[str]], episodes: Mapping[str, Episode]) -> tuple[int, int]:
    """Of the episodes that were open at kills: how many went on as they were, and how many.

    One goes on as it was if the store has it under the name with which it began. One that is
    dropped by a rule of the schedule has not begun again; one whose environment failed has.
    """
    kept = {name for name, one in episodes.items() if one.drop_reason != "environment"}
    return sum(len(names & kept) for names in open_at), sum(map(len, open_at))


def begun_again(
    open_at: Sequence[frozenset[str]], episodes: Mapping[str, Episode], least: float = 0.8
) -> list[str]:
    """At least `least` of the episodes that were open at a kill went on without starting again."""
    some, every = went_on(open_at, episodes)
    if some >= least * every:
        return []
    return [f"{some} of {every} episodes that were open at a kill went on as they were"]

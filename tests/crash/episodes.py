"""Checks the promises about episodes against the record that their environments write.

The checks are pure functions.

Invariants
- The record is a file that the environment itself writes (`noted_environment.py`). It contains each
  call that the environment received, even if the worker, the manager or the run died afterward.
- A name identifies an episode. An environment draws a new name at every reset. The name of an
  agent's episode consists of its seed and its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.crash.noted_environment import OPENING

MADE_UP = "Yes."  # Response that the trial episode before a run uses.
ENDED = ("finished", "scored", "batched")


@dataclass(frozen=True)
class Call:
    """A call that an environment received."""

    what: str
    name: str
    seed: int
    turn: int = 0
    text: str = ""


@dataclass(frozen=True)
class Episode:
    """An episode in the store or its export: its name and the policy's response in each turn."""

    trajectory_id: int
    name: str
    seed: int
    answers: tuple[str, ...]
    state: str
    drop_reason: str | None = None


def name_of(opening: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of an episode, which is in its first messages; "" if they have no name."""
    for message in opening:
        if str(message["content"]).startswith(OPENING):
            return str(message["content"])[len(OPENING) :]
    return ""


def calls_of(lines: Iterable[Mapping[str, Any]]) -> list[Call]:
    """Parse the calls, in the order in which the environments received them."""
    return [Call(**line) for line in lines]


def actions_not_stored(
    calls: Sequence[Call], episodes: Mapping[str, Episode], anew: int = 0
) -> list[str]:
    """Check that every response which an environment received is stored under its turn.

    Calls of evaluations are skipped: training never has their seeds. Trial episodes before a run
    are skipped by their response `MADE_UP`.

    Args:
        calls: Calls that environments received.
        episodes: Stored episodes by name.
        anew: Number of episodes that may have restarted from scratch, one for each fault that costs
            an episode.

    Returns:
        A message for each response that is not stored, or stored as another text.
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
                f"environment {call.name} of seed {call.seed} received a response, but the episode "
                "is not stored"
            )
        elif call.turn >= len(episode.answers):
            wrong.append(
                f"trajectory {episode.trajectory_id}: its environment received a response in turn "
                f"{call.turn}, but only {len(episode.answers)} responses are stored"
            )
        elif episode.answers[call.turn] != call.text:
            wrong.append(
                f"trajectory {episode.trajectory_id}: its environment received {call.text!r} in "
                f"turn {call.turn}, but {episode.answers[call.turn]!r} is stored"
            )
    return wrong


def answers_not_given(calls: Sequence[Call], episodes: Mapping[str, Episode]) -> list[str]:
    """Check that each stored response of an episode in a state of `ENDED` reached its environment.

    Returns:
        A message for each response that the environment never received.
    """
    given = {(call.name, call.turn, call.text) for call in calls if call.what == "step"}
    return [
        f"trajectory {one.trajectory_id} has the response {text!r} in turn {turn}, but its "
        "environment never received it"
        for one in episodes.values()
        if one.state in ENDED
        for turn, text in enumerate(one.answers)
        if (one.name, turn, text) not in given
    ]


def repeated_too_often(calls: Sequence[Call], lives: int) -> list[str]:
    """Check that no environment received a response more than `lives` times.

    Args:
        calls: Calls that environments received.
        lives: Number of times that the processes of the environments may have been started.

    Returns:
        A message for each response that was received more often.
    """
    counts = Counter((call.name, call.turn) for call in calls if call.what == "step")
    return [
        f"environment {name} received the response of turn {turn} {count} times in {lives} lives"
        for (name, turn), count in counts.items()
        if count > lives
    ]


def repeats(calls: Sequence[Call]) -> int:
    """Return how many times environments received a response again, over all episodes."""
    counts = Counter((call.name, call.turn) for call in calls if call.what == "step")
    return sum(count - 1 for count in counts.values())


def went_on(open_at: Sequence[frozenset[str]], episodes: Mapping[str, Episode]) -> tuple[int, int]:
    """Count the episodes that were open at kills.

    An episode continued if the store has it under its original name. An episode that the schedule
    dropped counts as continued; an episode that was dropped because its environment failed does
    not.

    Returns:
        The number of episodes that continued, and the number of all open episodes.
    """
    kept = {name for name, one in episodes.items() if one.drop_reason != "environment"}
    return sum(len(names & kept) for names in open_at), sum(map(len, open_at))


def begun_again(
    open_at: Sequence[frozenset[str]], episodes: Mapping[str, Episode], least: float = 0.8
) -> list[str]:
    """Check that at least the share `least` of the episodes that were open at a kill continued."""
    some, every = went_on(open_at, episodes)
    if some >= least * every:
        return []
    return [f"only {some} of {every} episodes that were open at a kill continued"]

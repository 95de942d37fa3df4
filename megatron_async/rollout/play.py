"""An episode played to its end beside training: by evaluation, with no store.

It is what `episodes.py` does for trajectories, by the same calls of the same workers.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_async.config.environment import EpisodeConfig
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.workers import HeldEpisodes
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.episodes import room_after
from megatron_async.rollout.respond import ResponseTokens, SharedEngines, Wanted, respond
from megatron_async.trajectory.types import (
    LEFT,
    FinishReason,
    IntArray,
    PolicyVersion,
    Turn,
    last_of,
)

_logger = logging.getLogger(__name__)


@dataclass
class PlayedEpisode:
    """An episode's turns and its end, the tokens of each answer, and the versions of them all."""

    answers: list[list[int]] = field(default_factory=list)
    versions: Counter[PolicyVersion] = field(default_factory=Counter)
    end: FinishReason | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the last answer that counts."""
        return self.answers[last_of(self.turns).number]

    def add(self, response: ResponseTokens) -> None:
        """Take an answer."""
        self.answers.append(response.token_ids)
        self.versions += response.versions

    def end_as(self, reason: str, left: Sequence[int]) -> None:
        """Note its end, and the turns that do not count."""
        self.end = FinishReason(reason)
        for number in left:
            turn = self.turns[number]
            self.turns[number] = replace(turn, answer={**(turn.answer or {}), LEFT: True})


async def play(
    held: HeldEpisodes,
    number: int,
    payload: Mapping[str, Any],
    wanted: Wanted,
    name: str,
    engines: SharedEngines,
    settings: EpisodeConfig,
    longest: int | None,
) -> PlayedEpisode | None:
    """Play an episode; None where its environment fails or engines refuse it.

    `number` and `name` are unique among those under way. Raises EngineError.
    """
    began, played = time.monotonic(), PlayedEpisode()
    branches: list[IntArray] = []  # up to the end of each turn
    try:
        opened = await held.begin(number, payload, room_after(longest, 0, wanted.limit))
        ids = opened.token_ids
        played.turns.append(Turn(0, None, 0, opened.messages, state=opened.state))
        while True:
            turn = played.turns[-1]
            response = await respond(wanted, ids, f"{name}.{turn.number}", engines)
            if response is None:
                return None
            played.add(response)
            ids = np.concatenate([ids, np.asarray(response.token_ids, np.int32)])
            branches.append(ids)
            late = time.monotonic() - began > settings.seconds
            stepped = await held.step(
                number,
                payload,
                played.turns,
                response.token_ids,
                logprobs=response.logprobs,
                room=room_after(longest, len(ids), wanted.limit),
                last=late or turn.number + 1 >= settings.max_turns,
            )
            played.turns[-1] = replace(
                turn, end=response.end, reward=stepped.reward, answer=stepped.answer, state=None
            )
            if stepped.ended is not None:
                played.end_as(stepped.ended, stepped.left)
                return played
            assert stepped.token_ids is not None
            parent = stepped.parent
            before = branches[parent] if parent is not None else ids[:0]
            ids = np.concatenate([before, stepped.token_ids])
            following = Turn(turn.number + 1, parent, 0, stepped.messages, state=stepped.state)
            played.turns.append(following)
    except (EnvironmentFault, ComponentFailure) as error:
        _logger.warning("episode %s failed: %s", name, error)
        return None
    finally:
        await held.forget(number)

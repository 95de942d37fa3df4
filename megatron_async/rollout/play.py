"""An episode played to its end beside training: by evaluation, with no store.

It is what `episodes.py` does for trajectories, by the same calls of the same workers.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_async.config.environment import EnvironmentConfig
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.workers import HeldEpisodes
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.episodes import room_after
from megatron_async.rollout.respond import ResponseTokens, SharedEngines, Wanted, respond
from megatron_async.trajectory.types import FinishReason, PolicyVersion, Turn

_logger = logging.getLogger(__name__)


@dataclass
class PlayedEpisode:
    """An episode's turns, its last answer's tokens and end, and the versions of all tokens."""

    token_ids: list[int] = field(default_factory=list)
    versions: Counter[PolicyVersion] = field(default_factory=Counter)
    end: FinishReason | None = None
    turns: list[Turn] = field(default_factory=list)

    def add(self, response: ResponseTokens) -> None:
        """Take an answer."""
        self.token_ids = response.token_ids
        self.versions += response.versions


async def play(
    held: HeldEpisodes,
    number: int,
    payload: Mapping[str, Any],
    wanted: Wanted,
    name: str,
    engines: SharedEngines,
    settings: EnvironmentConfig,
    longest: int | None,
) -> PlayedEpisode | None:
    """Play an episode; None where its environment fails or engines refuse it.

    `number` and `name` are unique among those under way. Raises EngineError.
    """
    began, played = time.monotonic(), PlayedEpisode()
    try:
        opened = await held.begin(number, payload)
        ids = opened.token_ids
        played.turns.append(Turn(0, None, 0, opened.messages, state=opened.state))
        while True:
            turn = played.turns[-1]
            response = await respond(wanted, ids, f"{name}.{turn.number}", engines)
            if response is None:
                return None
            played.add(response)
            ids = np.concatenate([ids, np.asarray(response.token_ids, np.int32)])
            late = time.monotonic() - began > settings.episode_seconds
            stepped = await held.step(
                number,
                payload,
                played.turns,
                response.token_ids,
                room=room_after(longest, len(ids), wanted.limit),
                last=late or turn.number + 1 >= settings.max_turns,
            )
            played.turns[-1] = replace(
                turn, end=response.end, reward=stepped.reward, answer=stepped.answer, state=None
            )
            if stepped.ended is not None:
                played.end = FinishReason(stepped.ended)
                return played
            assert stepped.token_ids is not None
            ids = np.concatenate([ids, stepped.token_ids])
            following = Turn(turn.number + 1, turn.number, 0, stepped.messages, state=stepped.state)
            played.turns.append(following)
    except (EnvironmentFault, ComponentFailure) as error:
        _logger.warning("episode %s failed: %s", name, error)
        return None
    finally:
        await held.forget(number)

"""The reward `task`: what the task itself scores with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from megatron_async.config.base import Settings
from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import UserError
from megatron_async.tasks.build import build_scorer
from megatron_async.tasks.rewards.compare import Exact, Math
from megatron_async.tasks.rewards.sample import Returned, Sample

_CHECKERS: Final[Mapping[str, type[Exact | Math]]] = MappingProxyType(
    {"exact": Exact, "math": Math}
)


class TaskReward(Settings):
    """reasoning-gym's own verifier; for a file the checker that `task.name` names."""

    def bound(self, settings: ScorerSettings, limit_seconds: float) -> Callable[[Sample], Returned]:
        """The reward. Raises UserError."""
        task = settings.task
        if task.kind != "reasoning_gym":
            if task.name not in _CHECKERS:
                raise UserError(
                    f"task.name is {task.name!r}, which cannot score rows of a file: set it to "
                    f"{' or '.join(_CHECKERS)}, which compare a response with the column `answer`, "
                    "or set `reward`"
                )
            checker = _CHECKERS[task.name](answer_marker=task.answer_marker)
            return checker.bound(settings, limit_seconds)
        scorer = build_scorer(task)

        def score(sample: Sample) -> Returned:
            scored = scorer.score(dict(sample.payload), sample.response)
            if scored.reward is None:
                raise ValueError("the scorer returned no reward")
            return scored.reward, scored.detail

        return score

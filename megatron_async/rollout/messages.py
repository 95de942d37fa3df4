"""Messages between a trainer and the rollout manager: where a run resumes, what an update brought.

Plain values: a trainer rank reads them without the rollout side's packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_async.errors import ComponentFailure

if TYPE_CHECKING:
    from megatron_async.rollout.evaluate import Evaluation


class NotAttached(ComponentFailure):
    """This trainer must attach: a manager that was started again has forgotten the one it had."""


@dataclass(frozen=True, eq=False)
class UpdateReport:
    """A verified update, and whether the trainer must ask for its evaluation now.

    `metrics`: how far log-probs were from the trainer's, of an update that was compared.
    `passed`: every engine that was sent the weights, none was left out or is sent them again.
    `evaluations`: those beside training that have ended since the update before.
    `warnings`: (name, message) of what the rollout side has reported since the update before.
    """

    metrics: Mapping[str, float]
    passed: bool
    evaluation_due: bool
    evaluations: tuple[Evaluation, ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint, if any, from which a run goes on along a lineage of its own.

    `parent` is the lineage that wrote the checkpoint, `store_position` where the store stood then.
    """

    lineage: int = 0
    step: int = 0
    parent: int | None = None
    store_position: int | None = None

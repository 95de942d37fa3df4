"""Provides the values that a trainer and the rollout manager exchange.

They say where a run resumes, and what a weight update has resulted in.

The module imports nothing of the rollout side at run time, so that a trainer rank can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_async.errors import ComponentFailure

if TYPE_CHECKING:
    from megatron_async.rollout.evaluate import Evaluation


class NotAttached(ComponentFailure):
    """Error for a call by a trainer that must attach first, for instance because the rollout
    manager was restarted and no longer knows it."""


@dataclass(frozen=True, eq=False)
class UpdateReport:
    """Outcome of a verified weight update, and whether the trainer must request an evaluation now.

    Attributes:
        metrics: Metrics of the differences between the engines' and the trainer's log-probs; empty
            if they were not compared.
        passed: Whether every engine that should receive the weights has loaded them and passed its
            checks.
        evaluation_due: Whether the trainer must request an evaluation and wait for it.
        evaluations: Evaluations concurrent with training that have finished since the last report.
        warnings: (name, message) of each warning of the rollout side since the last report.
    """

    metrics: Mapping[str, float]
    passed: bool
    evaluation_due: bool
    evaluations: tuple[Evaluation, ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ResumePoint:
    """Lineage and step of a session that starts, and the checkpoint from which it resumes, if any.
    A lineage is a number that each session of a run gets when it starts or resumes.

    Attributes:
        lineage: Lineage of the session that starts.
        step: Training step at which the run resumes; 0 for a new run.
        parent: Lineage of the session that wrote the checkpoint; None without a checkpoint.
        store_position: Number of transactions in the store when the checkpoint was written; None
            without a checkpoint.
    """

    lineage: int = 0
    step: int = 0
    parent: int | None = None
    store_position: int | None = None

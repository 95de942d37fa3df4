"""What can be read off a scheduler at any time: counts for metrics, never used for decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler.balance import Fleet
from megatron_async.scheduler.lifecycle import Lifecycle
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """A snapshot. Trajectory counts unless the name says otherwise.

    `finished_waiting`: finished or scored, group not complete. `unscored`: finished, no score yet.
    `finished_groups`: groups whose members all are finished or scored, `complete_groups` those of
    them that have all scores. `ring_fill`: batches that wait for the trainer, emitted ones and
    complete groups / B. `off_policy_share`: share of the newest batch's tokens that an older
    version than its step's wrote. `wasted_tokens`: of dropped and restarted trajectories;
    `regenerated` counts restarts because a scorer failed, which are among the `restarted` ones;
    `filtered_tokens` is the part for groups without reward variance.
    """

    version: PolicyVersion
    next_step: int
    concurrency: int
    in_flight: int
    in_flight_by_engine: Mapping[str, int]
    kv_tokens_by_engine: Mapping[str, int]
    buffered_partial: int
    buffered_tokens: int
    finished_waiting: int
    unscored: int
    open_groups: int
    finished_groups: int
    complete_groups: int
    ring_fill: float
    dropped: Mapping[DropReason, int]
    restarted: int
    regenerated: int
    wasted_tokens: int
    filtered_tokens: int
    off_policy_share: float
    exhausted: bool
    finished: bool


def snapshot(
    config: ScheduleConfig,
    life: Lifecycle,
    fleet: Fleet,
    *,
    version: PolicyVersion,
    concurrency: int,
    untaken_batches: int,
    exhausted: bool,
    finished: bool,
) -> SchedulerView:
    """Read everything off; O(engines)."""
    tally = life.tally
    engines = fleet.engines.values()
    done = tally.count[TrajectoryState.FINISHED] + tally.count[TrajectoryState.SCORED]
    return SchedulerView(
        version=version,
        next_step=life.lag.next_step,
        concurrency=concurrency,
        in_flight=fleet.in_flight,
        in_flight_by_engine={e.engine_id: len(e.running) for e in engines},
        kv_tokens_by_engine={e.engine_id: e.kv_tokens for e in engines},
        buffered_partial=tally.count[TrajectoryState.PARTIAL],
        buffered_tokens=tally.partial_tokens,
        finished_waiting=done - life.ready.trajectories,
        unscored=tally.unscored,
        open_groups=life.open_groups,
        finished_groups=life.finished_groups,
        complete_groups=life.ready.count,
        ring_fill=untaken_batches + life.ready.count / config.groups_per_batch,
        dropped=dict(tally.dropped),
        restarted=tally.restarted,
        regenerated=tally.regenerated,
        wasted_tokens=tally.wasted_tokens,
        filtered_tokens=tally.filtered_tokens,
        off_policy_share=tally.off_policy_share,
        exhausted=exhausted,
        finished=finished,
    )

"""Prompts become groups; what no engine can take is dropped at the door, and counted.

Invariants
- A prompt that is too long for the engines is a group in the store, dropped as `refused`: the
  number of groups is how far the task has been read.
- A refusal counts against its prompt alone. When many prompts in a row are refused and none is
  accepted, the settings are at fault, not the prompts: the run ends with a sentence about that.
  Of prompts that are too long, however many may come before one that fits (of a task sorted by
  length): the run ends when so many have come that a whole epoch is among them.
- So it does when dynamic sampling drops group after group and keeps none: no batch would ever come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_async.config import RunConfig
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.prompts import TaskPrompts
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scheduler import events as ev
from megatron_async.store.store import TrajectoryStore
from megatron_async.telemetry.learning import FilteredRounds
from megatron_async.trajectory.possible import impossible_tokens
from megatron_async.trajectory.types import (
    DropReason,
    Group,
    PolicyVersion,
    Trajectory,
    TrajectoryState,
)

_REFUSED_IN_ROW = 64


class Admission:
    """The way of prompts into a run."""

    def __init__(
        self,
        config: RunConfig,
        store: TrajectoryStore,
        prompts: TaskPrompts,
        statistics: RolloutStatistics,
        fail: Callable[[ComponentFailure], None],
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: tokens of the model; None: not known."""
        self._vocabulary = vocabulary
        self._group_size = config.schedule.group_size
        self._max_new_tokens = config.sampling.max_new_tokens
        self._store = store
        self._prompts = prompts
        self._statistics = statistics
        self._fail = fail
        self._refused: set[int] = set()  # groups, since a request was accepted
        self._too_long = 0  # prompts, since one that fits
        self._hopeless = False
        batch = config.schedule.groups_per_batch * self._group_size
        self._filtered = FilteredRounds(batch, config.trainer.max_filtered_rounds)

    def filtered(self, complete_groups: int) -> None:
        """Count a response of a group without reward variance; others wait for a batch."""
        self._filtered.kept(complete_groups)
        if self._filtered.dropped():
            self._statistics.warned("all_filtered", self._filtered.sentence())
        if self._filtered.hopeless:
            self._fail(ComponentFailure(self._filtered.sentence()))

    def batch_emitted(self) -> None:
        """Groups were kept."""
        self._filtered.emitted()

    def drop_untrainable(self, trajectory: Trajectory) -> bool:
        """Drop a stored trajectory that no trainer can take; True where it was one.

        An earlier version stored it, or a file is damaged.
        """
        if trajectory.state is TrajectoryState.DROPPED:
            return False
        for segment in trajectory.segments:
            if segment.from_environment:
                continue
            found = impossible_tokens(segment.token_ids, segment.logprobs, self._vocabulary)
            if found is not None:
                self._store.drop(trajectory.trajectory_id, DropReason.NONFINITE)
                self._statistics.dropped(DropReason.NONFINITE)
                self._statistics.warned(
                    "untrainable",
                    f"trajectory {trajectory.trajectory_id} is dropped, which the store holds and "
                    f"nothing can train: {found} (from engine {segment.engine_id})",
                )
                return True
        return False

    async def take(self, count: int, longest: int | None) -> tuple[ev.GroupSpec, ...]:
        """The next groups, `count` or fewer; none when the source is exhausted.

        `longest`: tokens of prompt and response together that every engine takes.
        """
        specs: list[ev.GroupSpec] = []
        while not specs and not self._hopeless:
            prompts = self._prompts.take(count)
            if not prompts:
                break
            for prompt in prompts:
                group = self._store.add_group(prompt, self._group_size)
                length = len(prompt.token_ids) + self._max_new_tokens
                if longest is not None and length > longest:
                    self._drop(group, longest)
                    continue
                self._too_long = 0
                specs.append(_spec(group))
            await asyncio.sleep(0)  # thousands may be too long, and the loop has other work too
        return tuple(specs)

    def _drop(self, group: Group, longest: int) -> None:
        for trajectory in group.trajectories:
            self._store.drop(trajectory.trajectory_id, DropReason.REFUSED)
            self._statistics.dropped(DropReason.REFUSED)
        self._too_long += 1
        # Each epoch has an order of its own: a whole one is among twice as many in a row.
        most = max(_REFUSED_IN_ROW, 2 * (self._prompts.in_epoch or 0))
        why = (
            f"with sampling.max_new_tokens {self._max_new_tokens} it is longer than the "
            f"{longest} tokens that an engine takes (engines.context_length, "
            "engines.max_total_tokens)"
        )
        self._report(group.trajectories[0], why, self._too_long, most)

    def refused(self, trajectory_id: int, group_id: int, why: str) -> None:
        """A request of this group will never be accepted."""
        if group_id in self._refused:
            return
        self._refused.add(group_id)
        trajectory = self._store.load_trajectory(trajectory_id)
        self._report(trajectory, why, len(self._refused), _REFUSED_IN_ROW)

    def _report(self, trajectory: Trajectory, why: str, in_row: int, most: int) -> None:
        """A prompt was refused, `in_row` with those before; after `most` the run ends."""
        prompt = trajectory.prompt
        self._statistics.warned(
            "prompt_refused",
            f"group {trajectory.group_id} of {prompt.task} is dropped, a prompt of "
            f"{len(prompt.token_ids)} tokens (megatron-async trajectories RUN --show "
            f"{trajectory.trajectory_id}): {why}",
        )
        if in_row < most:
            return
        self._hopeless = True
        sentence = f"{in_row} prompts in a row were refused and none was accepted; the last: {why}"
        self._fail(ComponentFailure(sentence))

    def accepted(self) -> None:
        """An engine has made tokens for a request."""
        self._refused.clear()


def _spec(group: Group) -> ev.GroupSpec:
    ids = tuple(trajectory.trajectory_id for trajectory in group.trajectories)
    prompt = group.prompt
    return ev.GroupSpec(group.group_id, ids, len(prompt.token_ids), prompt.priority)


def recovered_group(group: Group, lag_number: Callable[[PolicyVersion], int]) -> ev.RecoveredGroup:
    """Return what the scheduler must know of a group that the store still holds."""

    def recovered(trajectory: Trajectory) -> ev.RecoveredTrajectory:
        own = [segment for segment in trajectory.segments if not segment.from_environment]
        numbers = [lag_number(segment.version) for segment in own]
        return ev.RecoveredTrajectory(
            trajectory.trajectory_id,
            trajectory.state,
            trajectory.response_length,
            min(numbers, default=None),
            trajectory.reward,
            newest_version=max(numbers, default=None),
            drop_reason=trajectory.drop_reason,
        )

    return ev.RecoveredGroup(_spec(group), tuple(map(recovered, group.trajectories)))

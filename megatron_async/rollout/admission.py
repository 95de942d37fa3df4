"""Prompts become groups; what no engine can take is dropped at the door, and counted.

Invariants
- A prompt that is too long for the engines is a group in the store, dropped as `refused`: the
  number of groups is how far the task has been read.
- When the settings are at fault and not the prompts (`engine_health.py`), the run ends with a
  sentence about that. So it does when dynamic sampling drops group after group and keeps none: no
  batch would ever come.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from megatron_async.config import RunConfig
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.engine_health import PromptFailures, too_many_refusals
from megatron_async.rollout.prompts import TaskPrompts
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scheduler import events as ev
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.token_checks import find_invalid_token
from megatron_async.trajectory.types import (
    DropReason,
    Group,
    PolicyVersion,
    Trajectory,
    TrajectoryState,
)

# Batches' worth of responses that dynamic sampling drops in a row, with no group kept, after which
# the run stops. A policy that solves or fails every prompt gets no better by waiting longer.
MAX_FILTERED_ROUNDS: Final = 20


class FilterStreak:
    """Counts what dynamic sampling drops while it keeps no group: the run waits for ever then.

    A round is as many responses as a batch has.
    """

    def __init__(self, batch_trajectories: int) -> None:
        self._batch = batch_trajectories
        self._members = 0
        self._kept = 0

    @property
    def too_many_refusals(self) -> bool:
        """Return whether `MAX_FILTERED_ROUNDS` rounds are dropped in a row."""
        return self._members >= MAX_FILTERED_ROUNDS * self._batch

    def emitted(self) -> None:
        """A batch has taken what was kept."""
        self._members = self._kept = 0

    def dropped(self, complete_groups: int) -> bool:
        """Count a response of a group without variance; return whether a whole round is full.

        When the number of complete groups has grown, a group was kept.
        """
        if complete_groups > self._kept:
            self._members = 0
        self._kept = complete_groups
        self._members += 1
        return self._members == self._batch

    def message(self) -> str:
        """The warning as a sentence."""
        rounds = self._members / self._batch
        return (
            f"schedule.dynamic_sampling dropped the last {self._members} responses "
            f"({rounds:.0f} batches' worth) and kept none: the rewards within every group are "
            f"equal; check the scorer (`megatron-async trajectories RUN_DIR --show ID` prints a "
            "response with its reward), choose problems that are solved sometimes, start "
            "from a fine-tuned model, or set schedule.dynamic_sampling false"
        )


_OPEN = (TrajectoryState.PARTIAL, TrajectoryState.WAITING)


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
        self._has_episodes = config.has_episodes
        self._begins_anew = config.episode.resume == "restart"
        self._group_size = config.schedule.group_size
        self._max_new_tokens = config.sampling.max_new_tokens
        self._store = store
        self._prompts = prompts
        self._statistics = statistics
        self._fail = fail
        self.failures = PromptFailures()
        self._hopeless = False
        batch = config.schedule.groups_per_batch * self._group_size
        self._filtered = FilterStreak(batch)

    def filtered(self, complete_groups: int) -> None:
        """Count a response of a group without reward variance; others wait for a batch."""
        if self._filtered.dropped(complete_groups):
            self._statistics.warned("all_filtered", self._filtered.message())
        if self._filtered.too_many_refusals:
            self._fail(ComponentFailure(self._filtered.message()))

    def batch_emitted(self) -> None:
        """Groups were kept."""
        self._filtered.emitted()

    def recovered(self, end_if_complete: Callable[[int], bool]) -> tuple[ev.RecoveredGroup, ...]:
        """Return what the scheduler must know of the groups that the store still holds.

        One that no trainer can take is dropped before; `end_if_complete` finishes a trajectory
        whose end was not noted.
        """

        def mended(t: Trajectory) -> bool:
            if self._drop_untrainable(t):
                return True
            if self._begins_anew and t.turns and t.state in _OPEN:
                self._store.restart(t.trajectory_id)
                return True
            return t.state is TrajectoryState.PARTIAL and end_if_complete(t.trajectory_id)

        groups = []
        for found in self._store.unconsumed_groups():
            changed = [mended(t) for t in found.trajectories]
            group = self._store.load_group(found.group_id) if any(changed) else found
            groups.append(_recovered(group, self._store.lag_number))
        return tuple(groups)

    def event_of(self, groups: tuple[ev.RecoveredGroup, ...]) -> ev.Event:
        """The event with which the scheduler takes up recovered groups."""
        if not self._has_episodes:
            return ev.Recovered(groups)
        found = []  # (trajectory, tokens of its newest turn after the prompt) of open episodes
        for known in (known for group in groups for known in group.trajectories):
            trajectory = self._store.load_trajectory(known.trajectory_id)
            if trajectory.turns and trajectory.state in _OPEN:
                prompt, answer = trajectory.input_parts()
                held = sum(map(len, (*prompt[1:], *answer)))
                found.append((known.trajectory_id, held))
        return ev.RecoveredEpisodes(groups, tuple(found))

    def _drop_untrainable(self, trajectory: Trajectory) -> bool:
        """Drop a stored trajectory that no trainer can take; True where it was one.

        An earlier version stored it, or a file is damaged.
        """
        if trajectory.state is TrajectoryState.DROPPED:
            return False
        prompt = trajectory.prompt.token_ids
        pieces = [(prompt, np.zeros(len(prompt), np.float32), "its prompt")]
        pieces += [(s.token_ids, s.logprobs, f"engine {s.engine_id}") for s in trajectory.segments]
        for token_ids, logprobs, source in pieces:
            found = find_invalid_token(token_ids, logprobs, self._vocabulary)
            if found is not None:
                self._store.drop(trajectory.trajectory_id, DropReason.NONFINITE)
                self._statistics.dropped(DropReason.NONFINITE)
                self._statistics.warned(
                    "untrainable",
                    f"trajectory {trajectory.trajectory_id} is dropped, which the store holds and "
                    f"nothing can train: {found} (from {source})",
                )
                return True
        return False

    async def take(self, count: int, longest: int | None) -> tuple[ev.GroupSpec, ...]:
        """The next groups, `count` or fewer; none when the source is exhausted.

        `longest`: tokens of prompt and response together that any engine takes.
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
                self.failures.too_long = 0
                specs.append(_spec(group))
            await asyncio.sleep(0)  # thousands may be too long, and the loop has other work too
        return tuple(specs)

    def _drop(self, group: Group, longest: int) -> None:
        for trajectory in group.trajectories:
            self._store.drop(trajectory.trajectory_id, DropReason.REFUSED)
            self._statistics.dropped(DropReason.REFUSED)
        self.failures.too_long += 1
        in_row = self.failures.too_long
        why = (
            f"with sampling.max_new_tokens {self._max_new_tokens} it is longer than the "
            f"{longest} tokens that an engine takes (engines.context_length, "
            "engines.max_total_tokens)"
        )
        last = too_many_refusals(in_row, self._prompts.in_epoch)
        self._report(group.trajectories[0], why, in_row, last=last)

    def refused(self, trajectory_id: int, group_id: int, why: str) -> None:
        """A request of this group will never be accepted."""
        in_row = self.failures.refused(group_id)
        if in_row is not None:
            self._report(
                self._store.load_trajectory(trajectory_id),
                why,
                in_row,
                last=too_many_refusals(in_row),
            )

    def _report(self, trajectory: Trajectory, why: str, in_row: int, *, last: bool) -> None:
        """A prompt was refused, `in_row` with those before; with the `last` the run ends."""
        prompt = trajectory.prompt
        self._statistics.warned(
            "prompt_refused",
            f"group {trajectory.group_id} of {prompt.task} is dropped, a prompt of "
            f"{len(prompt.token_ids)} tokens (megatron-async trajectories RUN --show "
            f"{trajectory.trajectory_id}): {why}",
        )
        if last:
            self._hopeless = True
            message = f"{in_row} prompts in a row were refused and none was accepted; the last: "
            self._fail(ComponentFailure(message + why))


def _spec(group: Group) -> ev.GroupSpec:
    ids = tuple(trajectory.trajectory_id for trajectory in group.trajectories)
    prompt = group.prompt
    return ev.GroupSpec(group.group_id, ids, len(prompt.token_ids), prompt.priority)


def _recovered(group: Group, lag_number: Callable[[PolicyVersion], int]) -> ev.RecoveredGroup:
    def recovered(trajectory: Trajectory) -> ev.RecoveredTrajectory:
        own = [segment for segment in trajectory.segments if not segment.from_environment]
        numbers = [lag_number(segment.version) for segment in own]
        state = trajectory.state
        if state is TrajectoryState.WAITING and trajectory.turns[-1].end is None:
            state = TrajectoryState.PARTIAL  # its next turn can be submitted
        return ev.RecoveredTrajectory(
            trajectory.trajectory_id,
            state,
            sum(map(len, own)),
            min(numbers, default=None),
            trajectory.reward,
            newest_version=max(numbers, default=None),
            drop_reason=trajectory.drop_reason,
        )

    return ev.RecoveredGroup(_spec(group), tuple(map(recovered, group.trajectories)))

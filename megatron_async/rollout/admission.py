"""Prompts become groups; what no engine can take is dropped at the door, and counted.

Invariants
- A prompt that is too long for the engines is a group in the store, dropped as `refused`: the
  number of groups is how far the task has been read.
- A refusal counts against its prompt alone. When many prompts in a row are refused and none is
  accepted, the settings are at fault, not the prompts: the run ends with a sentence about that.
- So it does when dynamic sampling drops group after group and keeps none: no batch would ever come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_async.config import RunConfig
from megatron_async.engines.interface import PromptSource
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scheduler import events as ev
from megatron_async.store.store import TrajectoryStore
from megatron_async.telemetry.learning import FilteredRounds
from megatron_async.trajectory.types import DropReason, Group, PolicyVersion, Trajectory

_REFUSED_IN_ROW = 64


class Admission:
    """The way of prompts into a run."""

    def __init__(
        self,
        config: RunConfig,
        store: TrajectoryStore,
        prompts: PromptSource,
        statistics: RolloutStatistics,
        fail: Callable[[ComponentFailure], None],
    ) -> None:
        self._group_size = config.schedule.group_size
        self._max_new_tokens = config.sampling.max_new_tokens
        self._store = store
        self._prompts = prompts
        self._statistics = statistics
        self._fail = fail
        self._refused: set[int] = set()  # groups, since a request was accepted
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

    def take(self, count: int, longest: int | None) -> tuple[ev.GroupSpec, ...]:
        """The next `count` groups; fewer when the source is exhausted.

        `longest`: tokens of prompt and response together that every engine takes.
        """
        specs: list[ev.GroupSpec] = []
        while len(specs) < count and len(self._refused) < _REFUSED_IN_ROW:
            prompts = self._prompts.take(count - len(specs))
            if not prompts:
                break
            for prompt in prompts:
                group = self._store.add_group(prompt, self._group_size)
                whole = len(prompt.token_ids) + self._max_new_tokens
                if longest is not None and whole > longest:
                    self._drop(group, longest)
                    continue
                ids = tuple(t.trajectory_id for t in group.trajectories)
                length = len(prompt.token_ids)
                specs.append(ev.GroupSpec(group.group_id, ids, length, prompt.priority))
        return tuple(specs)

    def _drop(self, group: Group, longest: int) -> None:
        for trajectory in group.trajectories:
            self._store.drop(trajectory.trajectory_id, DropReason.REFUSED)
            self._statistics.dropped(DropReason.REFUSED)
        self.refused(
            group.trajectories[0].trajectory_id,
            group.group_id,
            f"with sampling.max_new_tokens {self._max_new_tokens} it is longer than the "
            f"{longest} tokens that an engine takes (engines.context_length, "
            "engines.max_total_tokens)",
        )

    def refused(self, trajectory_id: int, group_id: int, why: str) -> None:
        """A request of this group will never be accepted."""
        if group_id in self._refused:
            return
        self._refused.add(group_id)
        prompt = self._store.load_trajectory(trajectory_id).prompt
        self._statistics.warned(
            "prompt_refused",
            f"group {group_id} of {prompt.task} is dropped, a prompt of {len(prompt.token_ids)} "
            f"tokens (megatron-async trajectories RUN --show {trajectory_id}): {why}",
        )
        if len(self._refused) >= _REFUSED_IN_ROW:
            self._fail(
                ComponentFailure(
                    f"{_REFUSED_IN_ROW} prompts in a row were refused and none was accepted; "
                    f"the last: {why}"
                )
            )

    def accepted(self) -> None:
        """An engine has made tokens for a request."""
        self._refused.clear()


def recovered_group(
    trajectories: Sequence[Trajectory], lag_number: Callable[[PolicyVersion], int]
) -> ev.RecoveredGroup:
    """Return what the scheduler must know of a group that the store still holds."""
    first = trajectories[0]

    def numbers(trajectory: Trajectory) -> list[int]:
        return [lag_number(s.version) for s in trajectory.segments if not s.from_environment]

    return ev.RecoveredGroup(
        ev.GroupSpec(
            first.group_id,
            tuple(t.trajectory_id for t in trajectories),
            len(first.prompt.token_ids),
            first.prompt.priority,
        ),
        tuple(
            ev.RecoveredTrajectory(
                t.trajectory_id,
                t.state,
                t.response_length,
                min(numbers(t), default=None),
                t.reward,
                newest_version=max(numbers(t), default=None),
                drop_reason=t.drop_reason,
            )
            for t in trajectories
        ),
    )

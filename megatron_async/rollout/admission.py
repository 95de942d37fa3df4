"""Turns prompts into groups of trajectories, and drops and counts the prompts that no engine can
process.

A group is the set of trajectories that are sampled from one prompt.

Invariants
- A prompt that is too long for the engines still becomes a group in the store, and that group is
  dropped as `refused`. Every prompt that was not skipped (`prompts.py`) thus has a group, so a
  resumed run finds the next prompt from the number of groups.
- If engines refuse so many prompts in a row that the settings must be at fault and not the prompts
  (`too_many_refusals` in `engine_health.py`), the run ends with an error that says so. Dynamic
  sampling drops each group whose responses all have the same reward. If it drops every group for
  `MAX_FILTERED_ROUNDS` batches' worth of responses, the run ends too, because no batch would ever
  be complete.
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

# Number of batches' worth of responses that dynamic sampling may drop in a row before the run
# stops. If the policy solves or fails every prompt, no batch would ever be complete.
MAX_FILTERED_ROUNDS: Final = 20


class FilterStreak:
    """Counter of the responses that dynamic sampling has dropped since it last kept a group.

    Dynamic sampling drops each group whose responses all have the same reward. While it keeps no
    group, the run waits for a batch that never comes. A round is as many dropped responses as a
    batch has trajectories.
    """

    def __init__(self, batch_trajectories: int) -> None:
        self._batch = batch_trajectories
        self._members = 0
        self._complete_groups = 0

    @property
    def too_many_rounds(self) -> bool:
        """Whether dynamic sampling has dropped `MAX_FILTERED_ROUNDS` batches' worth of responses or
        more without keeping a group."""
        return self._members >= MAX_FILTERED_ROUNDS * self._batch

    def emitted(self) -> None:
        """Reset the count of dropped responses and the number of complete groups.

        A batch was emitted and has used up the complete groups, so groups were kept.
        """
        self._members = self._complete_groups = 0

    def dropped(self, complete_groups: int) -> bool:
        """Count a response that dynamic sampling dropped; return True if it is the one that makes
        the dropped responses in a row as many as a batch has.

        Args:
            complete_groups: Number of complete groups that wait for a batch. If the number has
                grown since the last call, a group was kept meanwhile, and counting starts again
                with this response.
        """
        if complete_groups > self._complete_groups:
            self._members = 0
        self._complete_groups = complete_groups
        self._members += 1
        return self._members == self._batch

    def message(self) -> str:
        """Return the warning that dynamic sampling has dropped all recent responses, with possible
        remedies."""
        rounds = self._members / self._batch
        return (
            f"schedule.dynamic_sampling dropped the last {self._members} responses "
            f"({rounds:.0f} batches' worth) and kept none, because the rewards within every group "
            f"are equal. Check the scorer (`megatron-async trajectories RUN_DIR --show ID` prints "
            "a response with its reward), choose problems that are solved sometimes, start "
            "from a fine-tuned model, or set schedule.dynamic_sampling to false."
        )


_OPEN = (TrajectoryState.PARTIAL, TrajectoryState.WAITING)


class Admission:
    """Adds the prompts of a task to the store as groups; at a resume, converts stored groups to the
    event by which the scheduler gets them.

    An `Admission` also ends the run if too many prompts in a row are refused, or if dynamic
    sampling drops too many responses in a row.
    """

    def __init__(
        self,
        config: RunConfig,
        store: TrajectoryStore,
        prompts: TaskPrompts,
        statistics: RolloutStatistics,
        fail: Callable[[ComponentFailure], None],
        vocabulary: int | None = None,
    ) -> None:
        """Create the admission of one driver, which adds the prompts from `prompts` to `store` as
        groups.

        Args:
            fail: Function that ends the run with an error.
            vocabulary: Number of tokens in the model's vocabulary; None if it is unknown.
        """
        self._vocabulary = vocabulary
        self._has_episodes = config.has_episodes
        self._restarts_episodes = config.episode.resume == "restart"
        self._group_size = config.schedule.group_size
        self._max_new_tokens = config.sampling.max_new_tokens
        self._store = store
        self._prompts = prompts
        self._statistics = statistics
        self._fail = fail
        self.failures = PromptFailures()
        self._ending = False
        batch = config.schedule.groups_per_batch * self._group_size
        self._filtered = FilterStreak(batch)

    def filtered(self, complete_groups: int) -> None:
        """Count a response that dynamic sampling dropped; warn after one batch's worth of dropped
        responses in a row, and end the run after `MAX_FILTERED_ROUNDS` batches' worth in a row.

        Args:
            complete_groups: Number of complete groups that wait for a batch.
        """
        if self._filtered.dropped(complete_groups):
            self._statistics.warned("all_filtered", self._filtered.message())
        if self._filtered.too_many_rounds:
            self._fail(ComponentFailure(self._filtered.message()))

    def batch_emitted(self) -> None:
        """Reset the count of responses that dynamic sampling has dropped in a row, because a batch
        was emitted."""
        self._filtered.emitted()

    def recovered(self, end_if_complete: Callable[[int], bool]) -> tuple[ev.RecoveredGroup, ...]:
        """Return the stored groups on which the current weights were not trained, in the form that
        the scheduler needs to resume them.

        Trajectories with invalid token ids or log-probs are dropped first. With
        `episode.resume: restart`, episodes that have not ended are reset to their prompt.

        Args:
            end_if_complete: Function that finishes a partial trajectory if its stored response is
                complete, and returns whether it was.
        """

        def updated(t: Trajectory) -> bool:
            if self._drop_untrainable(t):
                return True
            if self._restarts_episodes and t.turns and t.state in _OPEN:
                self._store.restart(t.trajectory_id)
                return True
            return t.state is TrajectoryState.PARTIAL and end_if_complete(t.trajectory_id)

        groups = []
        for found in self._store.unconsumed_groups():
            changed = [updated(t) for t in found.trajectories]
            group = self._store.load_group(found.group_id) if any(changed) else found
            groups.append(_recovered(group, self._store.lag_number))
        return tuple(groups)

    def event_of(self, groups: tuple[ev.RecoveredGroup, ...]) -> ev.Event:
        """Return the event that hands recovered groups to the scheduler.

        For a task with episodes, the event also has the context length of each episode that has not
        ended.
        """
        if not self._has_episodes:
            return ev.Recovered(groups)
        # Id and context length of each episode that has not ended. The context length counts the
        # tokens on the branch of the newest turn, without the tokens of the prompt.
        found = []
        for known in (known for group in groups for known in group.trajectories):
            trajectory = self._store.load_trajectory(known.trajectory_id)
            if trajectory.turns and trajectory.state in _OPEN:
                prompt, answer = trajectory.input_parts()
                length = sum(map(len, (*prompt[1:], *answer)))
                found.append((known.trajectory_id, length))
        return ev.RecoveredEpisodes(groups, tuple(found))

    def _drop_untrainable(self, trajectory: Trajectory) -> bool:
        """Drop a stored trajectory if its token ids or log-probs are invalid; return whether it was
        dropped.

        This version of the program stores no such trajectory. It comes from an earlier version, or
        a file is damaged.
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
                self._statistics.dropped(trajectory.trajectory_id, DropReason.NONFINITE)
                self._statistics.warned(
                    "untrainable",
                    f"dropped trajectory {trajectory.trajectory_id}, which is stored but cannot be "
                    f"trained: {found} (from {source})",
                )
                return True
        return False

    async def take(self, count: int, longest: int | None) -> tuple[ev.GroupSpec, ...]:
        """Add the next prompts of the task to the store as groups; return at most `count` groups
        that fit the engines.

        Groups whose prompt is too long are dropped. The result is empty if the task has no more
        prompts, or if the run is ending because too many prompts were refused.

        Args:
            longest: Maximum number of tokens of prompt and response together that an engine
                accepts; None if there is no known limit.
        """
        specs: list[ev.GroupSpec] = []
        while not specs and not self._ending:
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
            # Thousands of prompts in a row may be too long, so give other tasks of the event loop a
            # turn.
            await asyncio.sleep(0)
        return tuple(specs)

    def _drop(self, group: Group, longest: int) -> None:
        for trajectory in group.trajectories:
            self._store.drop(trajectory.trajectory_id, DropReason.REFUSED)
            self._statistics.dropped(trajectory.trajectory_id, DropReason.REFUSED)
        self.failures.too_long += 1
        in_row = self.failures.too_long
        why = (
            f"with sampling.max_new_tokens {self._max_new_tokens} it exceeds the "
            f"{longest} tokens that an engine accepts (engines.context_length, "
            "engines.max_total_tokens)"
        )
        last = too_many_refusals(in_row, self._prompts.epoch_size)
        self._report(group.trajectories[0], why, in_row, last=last)

    def refused(self, trajectory_id: int, group_id: int, why: str) -> None:
        """Record that engines refuse every request for this group's prompt; warn, and end the run
        if too many are refused.

        Refusals are counted by group, so a second refusal of the same group counts for nothing. The
        count restarts from 0 when an engine makes tokens for any request.
        """
        in_row = self.failures.refused(group_id)
        if in_row is not None:
            self._report(
                self._store.load_trajectory(trajectory_id),
                why,
                in_row,
                last=too_many_refusals(in_row),
            )

    def _report(self, trajectory: Trajectory, why: str, in_row: int, *, last: bool) -> None:
        """Warn that a prompt was refused, and end the run if this refusal is one too many.

        Args:
            in_row: Number of prompts refused in a row, including this one.
            last: Whether to end the run.
        """
        prompt = trajectory.prompt
        self._statistics.warned(
            "prompt_refused",
            f"dropped group {trajectory.group_id} of {prompt.task}, whose prompt has "
            f"{len(prompt.token_ids)} tokens (megatron-async trajectories RUN --show "
            f"{trajectory.trajectory_id}): {why}",
        )
        if last:
            self._ending = True
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
            # The environment has replied and the reply is stored as the input of the newest turn.
            # The scheduler can resume such a trajectory like a partial one, by requesting the
            # turn's response.
            state = TrajectoryState.PARTIAL
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

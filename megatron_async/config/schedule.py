"""Settings of the scheduler; each published schedule is one combination of their values.

`preset` names such a combination and only supplies defaults (see `config/recipes.py`). Any
combination is legal unless `ScheduleConfig` refuses it with a message.
"""

from typing import Literal

from pydantic import Field

from megatron_async.config.base import Settings

PresetName = Literal["sync", "rapid", "copris", "pipeline", "async"]


class ScheduleConfig(Settings):
    """Settings of the scheduler: starts of requests, step boundaries, weight updates."""

    preset: PresetName = "copris"
    """Name of the schedule whose defaults are used."""
    groups_per_batch: int = Field(16, ge=1)
    """Number of complete groups that make a batch (B)."""
    group_size: int = Field(8, ge=1)
    """Number of trajectories for each prompt (N)."""
    concurrency: int | Literal["auto"] = 64
    """Largest number of requests in flight on all engines together (N'). `auto`: the scheduler
    searches the number with which the most tokens are trained per second (docs/schedules.md)."""
    expected_tokens: int | None = Field(None, ge=1)
    """Number of tokens that `concurrency: auto` expects of a request, prompt included. The search
    starts with as many requests as fit into the KV cache at this length, but at most those of two
    batches. none = half of sampling.max_new_tokens."""
    open_episodes: int | Literal["auto"] | None = None
    """With `environment` or `agent`, largest number of episodes that have started and not ended; at
    least those of one group. auto and none = 2 * concurrency, because an episode that waits for its
    environment uses no request."""
    refill: Literal["continuous", "batch"] = "continuous"
    """When new groups start. `continuous`: whenever fewer requests are in flight than `concurrency`
    allows. `batch`: only as many as the current batch needs (times `oversample`); groups of the
    next batch start after it is complete."""
    boundary: Literal["drain", "abort", "continue", "pause"] = "abort"
    """Action when a batch is complete. `drain` waits for all running requests, `abort` ends them
    early and keeps their tokens, `continue` lets them run. `pause` pauses them with their KV cache
    until the next weights are loaded; it needs `overlap: false`, `weight_update: in_flight` and
    `kv: keep`."""
    weight_update: Literal["boundary", "in_flight"] = "boundary"
    """Time of a weight update. `boundary`: weights change while no request runs. `in_flight`:
    engines are paused for the transfer, and running requests continue with the new weights."""
    kv: Literal["keep", "recompute"] = "recompute"
    """Treatment of the KV cache of running requests at an in-flight update: it is kept, or
    recomputed with the new weights."""
    updates_per_batch: int = Field(1, ge=1, le=64)
    """Number of minibatches into which a batch is split, with one optimizer step each in every pass
    over the batch (H or G in papers)."""
    max_async_level: int | None = Field(None, ge=0)
    """Staleness bound k: step n trains only tokens of policy version max(0, n - k) or newer; none =
    no bound."""
    on_stale: Literal["wait", "drop", "restart", "mask"] = "drop"
    """Treatment of trajectories that would exceed the staleness bound. `wait` delays the batch
    until they complete, `drop` drops them, `restart` starts them again, `mask` trains only their
    tokens within the bound."""
    buffer_order: Literal["oldest_first", "newest_first", "longest_first"] = "oldest_first"
    """Order in which buffered partial trajectories are resumed."""
    max_waiting_batches: int = Field(2, ge=1)
    """Limit on finished groups that wait for their scores, for a batch or for the trainer, in
    multiples of groups_per_batch. No new group starts while the limit is reached."""
    overflow: Literal["block", "drop_oldest"] = "block"
    """Treatment of complete groups while the limit `max_waiting_batches` is reached. `block`: they
    are kept and trained, oldest first, and no new group starts until fewer wait. `drop_oldest`: the
    oldest complete groups beyond the limit are dropped, so that training data stay fresh, and only
    groups that wait for scores delay new groups."""
    max_regenerations: int = Field(2, ge=0)
    """Number of times that a trajectory is generated again after a failure of its scorer
    (task.on_scorer_timeout: regenerate) or environment, before its group is dropped."""
    oversample: float = Field(1.0, ge=1.0, le=8.0)
    """Number of groups that are started for a batch, as a multiple of groups_per_batch. It has an
    effect only with `refill: batch` or a staleness bound."""
    dynamic_sampling: bool = False
    """Whether groups whose rewards are all equal are dropped and replaced (DAPO). The reward of an
    episode is the sum over all its turns, also with `credit: turn`."""
    overlap: bool = False
    """Whether generation continues while the trainer works on a batch."""

    @property
    def in_place(self) -> bool:
        """Whether a weight update changes the weights of running requests and keeps their KV cache,
        which older weights have computed."""
        return self.weight_update == "in_flight" and self.kv == "keep"

    @property
    def stops_generation(self) -> bool:
        """Whether engines generate nothing while the trainer works on a batch, so that evaluations
        cannot run meanwhile either."""
        return self.boundary in ("drain", "pause")

    def check(self) -> None:
        if isinstance(self.concurrency, int) and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if isinstance(self.open_episodes, int) and self.open_episodes < 1:
            raise ValueError(f"open_episodes must be at least 1, got {self.open_episodes}")
        if self.updates_per_batch > self.groups_per_batch:
            raise ValueError(
                f"updates_per_batch is {self.updates_per_batch} and groups_per_batch is "
                f"{self.groups_per_batch}; each minibatch needs at least one group"
            )
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError(
                f"dynamic_sampling is true and group_size is {self.group_size}; it needs groups of "
                "at least 2, since one reward has no variance"
            )
        if self.boundary == "continue" and self.weight_update == "boundary" and self.overlap:
            raise ValueError(
                "boundary: continue with overlap: true requires weight_update: in_flight, got "
                "boundary"
            )
        if self.boundary == "pause" and (self.overlap or not self.in_place):
            raise ValueError(
                "schedule.boundary is pause, which keeps running requests on paused engines while "
                "the trainer works; it requires overlap: false, weight_update: in_flight and kv: "
                f"keep, got overlap: {str(self.overlap).lower()}, weight_update: "
                f"{self.weight_update} and kv: {self.kv}"
            )

"""The one policy space of the scheduler: every published schedule is a named point in it.

`preset` only supplies defaults (see `recipes.py`); any combination of the fields is legal unless
`ScheduleConfig` refuses it with a sentence.
"""

from typing import Literal

from pydantic import Field

from megatron_async.config.base import Settings

PresetName = Literal["sync", "rapid", "copris", "pipeline", "async"]


class ScheduleConfig(Settings):
    """Settings of the scheduler: starts of requests, step boundaries, weight updates."""

    preset: PresetName = "copris"
    """Named point whose defaults are used."""
    groups_per_batch: int = Field(16, ge=1)
    """B: complete groups that make a batch."""
    group_size: int = Field(8, ge=1)
    """N: trajectories for each prompt."""
    concurrency: int | Literal["auto"] = 64
    """N': requests in flight over all engines, or `auto` (closed loop)."""
    expected_tokens: int | None = Field(None, ge=1)
    """Tokens of a request in flight, prompt included, that `concurrency: auto` expects at its
    start; none = half of sampling.max_new_tokens."""
    open_episodes: int | Literal["auto"] | None = None
    """With `environment`: episodes that have begun and not ended at most, and at least a group's;
    auto (and none) = 2 N'. One that waits for its environment takes no slot."""
    refill: Literal["continuous", "batch"] = "continuous"
    """`continuous`: a replacement at every completion; `batch`: only what the current batch
    needs."""
    boundary: Literal["drain", "abort", "continue"] = "abort"
    """When a batch is complete: `drain` waits for all running requests, `abort` ends them early and
    keeps what they wrote, `continue` lets them run."""
    weight_update: Literal["boundary", "in_flight"] = "boundary"
    """`boundary`: weights change while no request runs; `in_flight`: engines are paused for the
    transfer and running requests go on with the new weights."""
    kv: Literal["keep", "recompute"] = "recompute"
    """KV cache of running requests at an in-flight update."""
    updates_per_batch: int = Field(1, ge=1, le=64)
    """H or G: optimizer steps on minibatches of one batch."""
    max_async_level: int | None = Field(None, ge=0)
    """k: rollouts of step n come from version max(0, n - k) or newer; none = free."""
    on_stale: Literal["wait", "drop", "restart", "mask"] = "drop"
    """What happens to a trajectory that would pass the lag bound. `wait` holds the update for it;
    `mask` trains only its tokens within the bound."""
    buffer_order: Literal["oldest_first", "newest_first", "longest_first"] = "oldest_first"
    """Order in which buffered partial trajectories are resumed."""
    max_waiting_batches: int = Field(2, ge=1)
    """Batches' worth of finished groups that may wait for their scores, for a batch or for the
    trainer; no new group starts while there are as many."""
    overflow: Literal["block", "drop_oldest"] = "block"
    """Action when finished groups fill `max_waiting_batches`, also after a stall: `block` trains
    all of them, oldest first, before new groups start; `drop_oldest` drops the oldest complete
    groups beyond the limit, so that training data stay fresh."""
    max_regenerations: int = Field(2, ge=0)
    """How often a member whose scorer failed is generated again (task.on_scorer_timeout:
    regenerate) before its group is dropped."""
    oversample: float = Field(1.0, ge=1.0, le=8.0)
    """Groups started per batch, as a multiple of B."""
    dynamic_sampling: bool = False
    """DAPO: groups whose rewards are all equal do not count and are dropped. An episode's is that
    of all its turns, also under `credit: turn`."""
    overlap: bool = False
    """Whether generation goes on while the trainer works on a batch."""

    @property
    def in_place(self) -> bool:
        """Return whether weights change under running requests that keep their KV cache."""
        return self.weight_update == "in_flight" and self.kv == "keep"

    def check(self) -> None:
        if isinstance(self.concurrency, int) and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if isinstance(self.open_episodes, int) and self.open_episodes < 1:
            raise ValueError(f"open_episodes must be at least 1, got {self.open_episodes}")
        if self.updates_per_batch > self.groups_per_batch:
            raise ValueError(
                f"updates_per_batch {self.updates_per_batch} needs at least as many groups, "
                f"groups_per_batch is {self.groups_per_batch}"
            )
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError(
                "dynamic_sampling needs groups of at least 2 (one reward has no variance), "
                f"group_size is {self.group_size}"
            )
        if self.boundary == "continue" and self.weight_update == "boundary" and self.overlap:
            raise ValueError(
                "boundary: continue with overlap: true needs weight_update: in_flight, got boundary"
            )

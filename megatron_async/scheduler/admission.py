"""How many new groups may be started: every limit of the policy space in one pure function.

Only the start of *groups* is limited here. Members of started groups and partial trajectories are
always let in (as far as slots go): a batch may be waiting for them, so holding them back could
hold everything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron_async.config.schedule import ScheduleConfig


class Occupancy(NamedTuple):
    """Where the started groups are. `open_groups`: neither in a batch nor dropped.

    `ready_groups` are the complete ones among them, `untaken_batches` were emitted and are not
    taken by the trainer, `version` is served by the engines, `next_step` is the next batch.
    """

    open_groups: int
    ready_groups: int
    untaken_batches: int
    version: int
    next_step: int


def groups_started_per_batch(config: ScheduleConfig) -> int:
    """B times `oversample`, rounded up."""
    return math.ceil(config.groups_per_batch * config.oversample)


def ring_full(config: ScheduleConfig, now: Occupancy) -> bool:
    """Whether the ring between generation and training (`overlap` only) holds all it may."""
    filled = now.untaken_batches * config.groups_per_batch + now.ready_groups
    return config.overlap and filled >= config.ring_batches * config.groups_per_batch


def new_groups_allowed(config: ScheduleConfig, now: Occupancy) -> int | None:
    """Groups that may be started now; None = as many as slots take.

    - lag bound k: open groups stay within (version + k + 1 - next_step) batches, as in AReaL's
      and PRIME-RL's capacity rules, plus the surplus that `oversample` asks for;
    - `refill: batch`: no more than one (oversampled) batch is open;
    - `overflow: block` with `overlap`: none while the ring is full.
    """
    batch = config.groups_per_batch
    limits = []
    if config.max_async_level is not None:
        batches = now.version + config.max_async_level + 1 - now.next_step
        surplus = groups_started_per_batch(config) - batch
        limits.append((batches * batch + surplus if batches > 0 else 0) - now.open_groups)
    if config.refill == "batch":
        limits.append(groups_started_per_batch(config) - now.open_groups)
    if config.overflow == "block" and ring_full(config, now):
        limits.append(0)
    return max(0, min(limits)) if limits else None

"""How many new groups may be started: every limit of the policy space in one pure function.

Only the start of *groups* is limited here. Members of started groups and partial trajectories are
always let in (as far as slots go): a batch may be waiting for them, so holding them back could
hold everything.

Invariants
- Back-pressure never stops a run: what holds new groups back is finished, at least one batch of it
  (`ring_batches` >= 1), and goes on without them, to a score, a batch, the trainer or a drop.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from megatron_async.config.schedule import ScheduleConfig


class Occupancy(NamedTuple):
    """Where the started groups are. `open_groups`: neither in a batch nor dropped.

    `finished_groups` are those among them that wait for scores or for a batch, `ready_groups` the
    complete ones of these, `untaken_batches` were emitted and are not taken by the trainer,
    `version` is served by the engines, `next_step` is the next batch.
    """

    open_groups: int
    finished_groups: int
    ready_groups: int
    untaken_batches: int
    version: int
    next_step: int


def groups_started_per_batch(config: ScheduleConfig) -> int:
    """B times `oversample`, rounded up."""
    return math.ceil(config.groups_per_batch * config.oversample)


class Cause(enum.Enum):
    """What new groups wait for when `ring_batches` are full."""

    SCORES = "scores"
    TRAINER = "trainer"


def held_back_by(config: ScheduleConfig, now: Occupancy) -> Cause | None:
    """What no new group may start for, if so much waits between generation and training.

    Under `overflow: drop_oldest` only what has no score yet counts: the rest makes room by leaving.
    """
    limit = config.ring_batches * config.groups_per_batch
    unscored = now.finished_groups - now.ready_groups
    complete = now.untaken_batches * config.groups_per_batch + now.ready_groups
    if config.overflow == "drop_oldest":
        complete = 0
    if unscored + complete < limit:
        return None
    return Cause.TRAINER if complete >= limit else Cause.SCORES


def new_groups_allowed(config: ScheduleConfig, now: Occupancy) -> int | None:
    """Groups that may be started now; None = as many as slots take.

    - lag bound k: open groups stay within (version + k + 1 - next_step) batches, as in AReaL's
      and PRIME-RL's capacity rules, plus the surplus that `oversample` asks for;
    - `refill: batch`: no more than one (oversampled) batch is open;
    - back-pressure: none while finished groups fill `ring_batches` (`held_back_by`).
    """
    batch = config.groups_per_batch
    limits = []
    if config.max_async_level is not None:
        batches = now.version + config.max_async_level + 1 - now.next_step
        surplus = groups_started_per_batch(config) - batch
        limits.append((batches * batch + surplus if batches > 0 else 0) - now.open_groups)
    if config.refill == "batch":
        limits.append(groups_started_per_batch(config) - now.open_groups)
    if held_back_by(config, now) is not None:
        limits.append(0)
    return max(0, min(limits)) if limits else None

"""Provides the scheduler: a state machine that decides what runs, what is batched and when weights
change.

It does no I/O. It receives events and returns actions, which its caller carries out.

- events: all events and actions.
- scheduler: the state machine, and the limits on what may start. It has no clock and no randomness,
  so the same events always cause the same actions.
- lifecycle: the states of trajectories and groups. A trajectory leaves only in a batch or by a drop
  that is counted.
- state: the entries that the scheduler keeps for each trajectory, group and engine.
- queues: trajectories that wait for a free request, and complete groups that wait for a batch.
- lag: the staleness bound: which groups the next batch may contain, and which it must contain.
- balance: the choice of an engine for a trajectory: fewest KV tokens, and groups on one engine.
- update_gate: the weight update: engines are idle or paused before weights change.
- auto_concurrency: `schedule.concurrency: auto`, as pure functions of a state.
- warnings: warnings about queues and engines for the user.
- counts: running counts, and the snapshot of them that metrics read.
- record, snapshot: events are recorded and replayed; the whole state is saved as JSON types.
"""

from megatron_async.scheduler.counts import SchedulerView
from megatron_async.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerView"]

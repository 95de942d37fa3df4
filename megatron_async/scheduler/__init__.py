"""Provides the scheduler: a state machine that decides what runs, what is batched and when weights
change.

It does no I/O. It receives events and returns actions, which its caller carries out.

- events: all events and actions.
- scheduler: the state machine, and the limits on what may start. It has no clock and no randomness,
  so the same events always cause the same actions.
- lifecycle: the states of trajectories and groups. A trajectory leaves the scheduler only in a
  batch or by a drop, and every drop is counted.
- state: the entries that the scheduler keeps for each trajectory, group and engine.
- queues: trajectories that wait until one more request may run, and complete groups that wait for a
  batch.
- lag: the staleness bound: which groups the next batch may contain, and which it must contain.
- balance: chooses an engine for a trajectory: the least loaded one, one that already runs members
  of the trajectory's group, or the one that ran the last turn of the episode.
- update_gate: allows a weight update once engines are idle or paused.
- auto_concurrency: finds the number of requests in flight that gives the largest throughput
  (`schedule.concurrency: auto`), as pure functions of a state.
- warnings: warnings about queues and engines for the user.
- counts: running counts, and the snapshot of them that metrics read.
- record: writes events and actions to files, and replays such files. snapshot: saves the whole
  state of a scheduler as JSON types, and restores it.
"""

from megatron_async.scheduler.counts import SchedulerView
from megatron_async.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerView"]

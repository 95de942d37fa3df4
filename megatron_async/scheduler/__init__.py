"""The sans-IO state machine that decides what runs, what is batched and when weights change.

- events: its whole vocabulary: events in, actions out.
- scheduler: the machine, and what may start. No clock, no randomness; same events, same actions.
- lifecycle: the states of trajectories and groups; nothing leaves but by a batch or a counted drop.
- state: the entries of trajectory, group and engine.
- queues: trajectories for a slot, complete groups for a batch.
- lag: the staleness bound: what the next batch may hold and must not leave behind.
- balance: the engine of a trajectory: fewest KV tokens, groups together.
- update_gate: engines are made ready, then weights change.
- auto_concurrency: `concurrency: auto`, pure functions of a state.
- warnings: queues and engines that a person should hear of.
- counts: running counts, and the view of them for metrics.
- record, snapshot: events recorded and replayed; the whole state as JSON types.
"""

from megatron_async.scheduler.counts import SchedulerView
from megatron_async.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerView"]

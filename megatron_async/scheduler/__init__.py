"""The sans-IO state machine that decides what runs, what is batched and when weights change."""

from megatron_async.scheduler.counts import SchedulerView
from megatron_async.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerView"]

"""The sans-IO state machine that decides what runs, what is batched and when weights change."""

from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.scheduler.view import SchedulerView

__all__ = ["Scheduler", "SchedulerView"]

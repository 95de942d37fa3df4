"""Rewards: the user's own and the built-in ones, run in scorer processes."""

from megatron_async.tasks.rewards.sample import Sample, Unavailable

__all__ = ["Sample", "Unavailable"]

"""Rewards: the user's own and the built-in ones, run in scorer processes.

- sample: what a reward reads, and the score that it may return.
- reward: a reward as its settings describe it; the user's code is imported in a scorer process.
- check: a reward tried before a run starts.
- compare: `exact`, `regex`, `math`, and `task`: what the task itself scores with.
- code, unit_tests: programs run in the sandbox; code_blocks: the code in a response.
- services: `http` and `judge`, asked over the network.
"""

from megatron_async.scoring.rewards.sample import Sample, Unavailable

__all__ = ["Sample", "Unavailable"]

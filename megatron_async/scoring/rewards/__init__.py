"""Provides rewards, functions that score a response: the built-in ones and the user's own.

Rewards run in scorer processes.

- sample: the argument of a reward function, and the check of the value that it returns.
- reward: builds a reward from its settings; imports the user's code.
- check: tries the rewards before a run starts.
- compare: the rewards `exact`, `regex`, `math` and `task` (the task's own scorer).
- code, unit_tests: the rewards `code` and `command`, which run programs in the sandbox.
- code_blocks: finds the code in a response.
- services: the rewards `http` and `judge`, which call a service over the network.
"""

from megatron_async.scoring.rewards.sample import Sample, Unavailable

__all__ = ["Sample", "Unavailable"]

"""Environments: what a policy plays against over many turns (docs/environments.md).

A user's class imports `Answer` and `Step` from here and nothing else.
"""

from megatron_async.environments.interface import Answer, Step, ToolCall

__all__ = ["Answer", "Step", "ToolCall"]

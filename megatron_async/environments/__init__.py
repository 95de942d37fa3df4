"""Environments: what a policy plays against over many turns.

A user's class imports `Answer` and `Step` from here and nothing else.

- interface: what an environment gets and gives back, checked.
- tools: public methods as tools, and the calls in an answer.
- player: one object of the user's class, played.
- conversation: tokens of the turns, by the chat template.
- worker: a process that holds many episodes. workers: how the rollout side calls them.
- check: an episode played before anything starts.
"""

from megatron_async.environments.interface import Answer, Step, ToolCall

__all__ = ["Answer", "Step", "ToolCall"]

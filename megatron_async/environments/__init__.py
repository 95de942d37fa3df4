"""Environments: what a policy plays against over many turns.

A user's class imports `Answer` and `Step` from here and nothing else.

- interface: what an environment gets and gives back, checked.
- tools: public methods as tools, and the calls in an answer. tool_arguments: types of their
  arguments. json_text: JSON that a model reads.
- environment_runner: one object of the user's class, played.
- conversation: tokens of the turns, by the chat template.
- worker: a process that holds many episodes. workers: how the rollout side calls them.
- agents: programs that call the policy, as a worker plays them. programs: how they run.
- gateway, chat: the OpenAI chat API over HTTP, and its forms. calls: which calls are the same.
- matching: the branch that a call continues. chat_codec: calls and answers as tokens.
- check: an episode played before anything starts.
"""

from megatron_async.environments.interface import Answer, Step, ToolCall

__all__ = ["Answer", "Step", "ToolCall"]

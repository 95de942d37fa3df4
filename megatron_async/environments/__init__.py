"""Lets a policy play episodes: conversations of many turns with a user's environment or agent.

An environment is a class that replies to the policy; an agent is a program that calls the policy
through the OpenAI chat API. A user's environment class imports `Answer`, `Step` and `ToolCall` from
this package and nothing else.

- interface: the types that an environment receives and returns, and their checks.
- tools: an environment's public methods as tools, and the tool calls in a response.
  tool_arguments: types of tool arguments. json_text: JSON that a model reads.
- environment_runner: calls the methods of one environment object.
- conversation: tokens of the turns, by the model's chat template.
- worker: a process that runs many episodes. workers: the client through which the rollout manager
  and evaluations call these processes.
- agents: agents' episodes in a worker. programs: how a worker runs an agent's program.
- gateway, chat: the OpenAI chat API over HTTP, and its formats. calls: queues an agent's calls, and
  recognizes a call that repeats an earlier one.
- matching: which branch of an episode a call continues. chat_codec: converts calls to tokens, and
  responses to replies.
- check: a trial episode that is played before a run starts.
"""

from megatron_async.environments.interface import Answer, Step, ToolCall

__all__ = ["Answer", "Step", "ToolCall"]

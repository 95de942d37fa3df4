"""The OpenAI chat API: what a call may ask for, and the forms of answers.

Pure. A call is read and checked here, once; what cannot be honored is refused by a sentence, never
left out in silence. Sampling is the run's: other values in a call are noted, and not used.

Invariants
- A message here is what a chat template takes: text content, calls of tools with their arguments as
  an object. The tools of a call are a message before all others (`TOOLS_ROLE`).
- Equal answers have equal forms, ids included: a program that runs again is given the same.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from megatron_async.config.rollout import SamplingConfig
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.json_text import json_text
from megatron_async.environments.matching import TOOLS_ROLE, Message
from megatron_async.environments.tools import MOST_NESTED, is_nested_deeply
from megatron_async.errors import short_repr

TOO_LONG: Final = "context_length_exceeded"
"""The code by which programs know that they may shorten their messages and go on."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_IGNORED: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"verbosity"}
)
_READ: Final = frozenset(
    {"model", "messages", "stream", "stream_options", "tools", "tool_choice", "logprobs"}
    | {"parallel_tool_calls"}
)
_SWITCHES: Final = ("stream", "logprobs", "parallel_tool_calls")
"""Parameters that are true or false."""
_TOKENS: Final = ("max_new_tokens", TypeAdapter(Annotated[int, Field(strict=True, ge=1)]))
_SAMPLING: Final[Mapping[str, tuple[str, TypeAdapter[Any]]]] = {
    "temperature": ("temperature", TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=2)])),
    "top_p": ("top_p", TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=1)])),
    "top_k": ("top_k", TypeAdapter(Annotated[int, Field(strict=True, ge=-1)])),
    "max_tokens": _TOKENS,
    "max_completion_tokens": _TOKENS,
}
"""The run's setting that is used in place of a parameter, and the values that the API permits."""
_NEUTRAL: Final[Mapping[str, Sequence[Any]]] = {
    "n": (1,),
    "stop": ([], ""),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values that ask for nothing that is not done anyway; null is another."""
_UNSEEDED: Final = ("seed", "reasoning_effort")
_PIECE: Final = 32


class CallRefused(EnvironmentFault):
    """A call that cannot be honored, as the API reports it."""

    def __init__(self, message: str, param: str = "", *, status: int = 400, code: str = "") -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def body(self) -> dict[str, Any]:
        """The API's form of an error."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        found = {"message": str(self), "type": kind}
        return {"error": {**found, "param": self.param or None, "code": self.code or None}}


@dataclass(frozen=True)
class ChatCall:
    """A checked call.

    `parallel_calls`: the program takes several calls of tools in one answer. `notices`: what it
    asks of sampling that the run's settings do not do.
    """

    messages: tuple[Message, ...]
    model: str = ""
    calls_tools: bool = True
    logprobs: bool = False
    stream: bool = False
    with_usage: bool = False
    notices: tuple[str, ...] = ()
    parallel_calls: bool = True

    @property
    def tools(self) -> str:
        """The descriptions of its tools, as JSON; empty: none."""
        return tools_of(self.messages)


@dataclass(frozen=True)
class ChatAnswer:
    """An answer of the policy. `calls`: tools with their arguments.

    `logprobs`: each token's text and number. Bytes of a token that holds part of a character are
    lone surrogates in its text (`surrogateescape`).

    `name` is unique among a run's episodes' answers, and the same when it is given again.
    """

    name: str
    content: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    truncated: bool = False
    tokens: tuple[int, int] = (0, 0)
    logprobs: tuple[tuple[str, float], ...] | None = None

    @property
    def message(self) -> Message:
        """The answer as a message of a conversation."""
        given = [dict(arguments) for _, arguments in self.calls]
        return _assistant(self.content, self._calls(given))

    @property
    def finish(self) -> str:
        """The API's name of why it ended."""
        if self.truncated:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def _calls(self, arguments: Sequence[Any]) -> list[dict[str, Any]]:
        """The calls with their arguments, in whatever form those are."""
        named = zip(self.calls, arguments, strict=True)
        forms = [{"name": name, "arguments": given} for (name, _), given in named]
        return [
            {"id": f"call_{self.name}-{number}", "type": "function", "function": form}
            for number, form in enumerate(forms)
        ]

    def _sent_calls(self) -> list[dict[str, Any]]:
        return self._calls([json_text(arguments) for _, arguments in self.calls])

    def _usage(self) -> dict[str, int]:
        before, made = self.tokens
        return {"prompt_tokens": before, "completion_tokens": made, "total_tokens": before + made}

    def _choice(self, **parts: Any) -> dict[str, Any]:
        return {"index": 0, "finish_reason": None, "logprobs": None, **parts}

    def _logprobs(self) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        content = []
        for text, logprob in self.logprobs:
            found = text.encode(errors="surrogateescape")
            token = {"token": found.decode(errors="replace"), "logprob": logprob}
            content.append({**token, "bytes": list(found), "top_logprobs": []})
        return {"content": content, "refusal": None}

    def completion(self, model: str, created: int) -> dict[str, Any]:
        """The body of a reply that is no stream."""
        calls = {"tool_calls": self._sent_calls()} if self.calls else {}
        message = {"role": "assistant", "content": self.content, "refusal": None, **calls}
        ended = {"finish_reason": self.finish, "logprobs": self._logprobs()}
        head = self._head("chat.completion", model, created)
        return {**head, "choices": [self._choice(message=message, **ended)], "usage": self._usage()}

    def chunks(self, model: str, created: int, *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """The bodies of a stream's events."""
        head = self._head("chat.completion.chunk", model, created)
        first, text = {"role": "assistant", "content": ""}, self.content
        yield {**head, "choices": [self._choice(delta=first, logprobs=self._logprobs())]}
        for at in range(0, len(text), _PIECE):
            yield {**head, "choices": [self._choice(delta={"content": text[at : at + _PIECE]})]}
        for number, call in enumerate(self._sent_calls()):
            delta = {"tool_calls": [{"index": number, **call}]}
            yield {**head, "choices": [self._choice(delta=delta)]}
        yield {**head, "choices": [self._choice(delta={}, finish_reason=self.finish)]}
        if with_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _head(self, kind: str, model: str, created: int) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.name}", "object": kind, "created": created, "model": model}


def model(created: int, name: str) -> dict[str, Any]:
    """Return the body that describes a model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "megatron-async"}


def models(created: int, name: str) -> dict[str, Any]:
    """Return the body of the list of models."""
    return {"object": "list", "data": [model(created, name)]}


def tools_of(messages: Sequence[Message]) -> str:
    """The descriptions of the tools of a conversation, as JSON; empty: none."""
    return messages[0]["content"] if messages and messages[0]["role"] == TOOLS_ROLE else ""


def checked_call(body: Any, sampling: SamplingConfig) -> ChatCall:
    """Read the body of a call. Raises CallRefused."""
    if not isinstance(body, dict):
        raise CallRefused(f"the body is {short_repr(body)}; it must be a JSON object")
    asked = {name: value for name, value in body.items() if value is not None}
    _refuse_unknown(asked)
    for name in _SWITCHES:
        if not isinstance(asked.get(name, False), bool):
            raise CallRefused(
                f"{name} is {short_repr(asked[name])}; it must be true or false", name
            )
    for name, (_, valid) in _SAMPLING.items():
        try:
            if name in asked:
                valid.validate_python(asked[name])
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise CallRefused(f"{name} is {short_repr(asked[name])}: {why}", name) from error
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CallRefused(
            f"messages is {short_repr(messages)}; it must be a list of at least one message",
            "messages",
        )
    read = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    tools = _tools(asked.get("tools", []))
    choice = asked.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise CallRefused(
            f"tool_choice is {short_repr(choice)}; the policy is free to call or not: auto or none",
            "tool_choice",
        )
    options = asked.get("stream_options", {})
    return ChatCall(
        (*tools, *read),
        str(asked.get("model", "policy")),
        choice == "auto",
        asked.get("logprobs", False),
        asked.get("stream", False),
        isinstance(options, dict) and options.get("include_usage") is True,
        tuple(_notices(asked, sampling)),
        asked.get("parallel_tool_calls", True),
    )


def _refuse_unknown(asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        if name in _NEUTRAL:
            # Python holds True equal to 1.
            if isinstance(value, bool) or value not in _NEUTRAL[name]:
                best = _NEUTRAL[name][0]
                raise CallRefused(
                    f"{name} is {short_repr(value)}, which cannot be honored while training: "
                    f"leave it out, or at {json_text(best)}",
                    name,
                )
        elif name not in _READ | _IGNORED | _SAMPLING.keys() and name not in _UNSEEDED:
            raise CallRefused(
                f"{name} is {short_repr(value)}, and is not known here: leave it out", name
            )


def _notices(asked: Mapping[str, Any], sampling: SamplingConfig) -> Iterator[str]:
    for name, value in asked.items():
        if name in _UNSEEDED:
            yield f"an agent asks for {name}, which has no effect here"
        elif name in _SAMPLING:
            setting, _ = _SAMPLING[name]
            used = getattr(sampling, setting)
            if value != used:
                yield (
                    f"an agent asks for another {name}; the run's "
                    f"sampling.{setting} {used:g} is used"
                )


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise CallRefused(
            f"{where} is {short_repr(message)}; it must have a role of {', '.join(_ROLES)}",
            "messages",
        )
    for odd in ("audio", "function_call"):
        if message.get(odd) is not None:
            raise CallRefused(f"{where} has {odd!r}, which cannot be honored", "messages")
    content = _content(message.get("content"), where)
    role = message["role"]
    if role == "assistant":
        return _assistant(content, _calls(message.get("tool_calls") or [], where))
    kept = {n: message[n] for n in ("name", "tool_call_id") if isinstance(message.get(n), str)}
    return {"role": "system" if role == "developer" else role, "content": content, **kept}


def _assistant(content: str, calls: Sequence[Mapping[str, Any]]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls)} if calls else message


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise CallRefused(
            f"{where} has the content {short_repr(content)}; it must be text (images, audio and "
            "files cannot be shown to the policy)",
            "messages",
        )
    return "".join(map(str, texts))


def _calls(calls: Any, where: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    try:
        for call in calls:
            function = call["function"]
            given = {"name": str(function["name"]), "arguments": _arguments(function["arguments"])}
            found.append({"id": str(call["id"]), "type": "function", "function": given})
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise CallRefused(
            f"{where} has the tool_calls {short_repr(calls)}; each has an id and a function with a "
            f"name and arguments, a JSON object as text, nested {MOST_NESTED} times at most",
            "messages",
        ) from error
    return found


def _arguments(text: Any) -> dict[str, Any]:
    found = json.loads(text or "{}") if isinstance(text, str) else text
    if not isinstance(found, dict) or is_nested_deeply(found):
        raise ValueError("no object that can be shown")
    return found


def _tools(tools: Any) -> tuple[Message, ...]:
    if not isinstance(tools, list) or is_nested_deeply(tools):
        raise CallRefused(f"tools is {short_repr(tools)}; it must be a list of few levels", "tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or tool.get("type") != "function":
            raise CallRefused(
                f"tools has {short_repr(tool)}; each must be a function with a name", "tools"
            )
    return ({"role": TOOLS_ROLE, "content": json_text(tools)},) if tools else ()

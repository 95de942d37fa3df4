"""Parses requests of the OpenAI chat API, and formats the policy's responses as replies of the API.

Functions of this module have no side effects. `checked_call` parses and checks a request once. A
parameter that this API does not support is refused with an error message. For sampling parameters,
such as the temperature, the run's settings are used in place of the request's values, and `seed`
and `reasoning_effort` have no effect; the user gets a notice of both. A few other parameters, such
as `user` and `metadata`, are ignored without a notice.

Invariants
- A parsed message has the form that chat templates expect: text content, and tool calls whose
  arguments are an object. The tools that a request offers are a message before all others
  (`TOOLS_ROLE`).
- Equal responses have equal replies, including their IDs, so that a program that runs again gets
  the same replies.
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
from megatron_async.environments.tools import MAX_NESTED, is_nested_deeply
from megatron_async.errors import short_repr

TOO_LONG: Final = "context_length_exceeded"
"""Error code that tells a program to shorten its messages, or to end."""
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
"""Parameters of a request that must be true or false."""
_TOKENS: Final = ("max_new_tokens", TypeAdapter(Annotated[int, Field(strict=True, ge=1)]))
_SAMPLING: Final[Mapping[str, tuple[str, TypeAdapter[Any]]]] = {
    "temperature": ("temperature", TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=2)])),
    "top_p": ("top_p", TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=1)])),
    "top_k": ("top_k", TypeAdapter(Annotated[int, Field(strict=True, ge=-1)])),
    "max_tokens": _TOKENS,
    "max_completion_tokens": _TOKENS,
}
"""For each sampling parameter of a request: the setting below `sampling` that is used instead, and
the values that the API permits."""
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
"""Parameters that the gateway does not support, and their values that change nothing. A request may
only have one of these values or null."""
_WITHOUT_EFFECT: Final = ("seed", "reasoning_effort")
_CHUNK: Final = 32
"""Number of characters of the response in each event of a stream."""


class CallRefused(EnvironmentFault):
    """Error for a request of the chat API that cannot be honored, with its HTTP status."""

    def __init__(self, message: str, param: str = "", *, status: int = 400, code: str = "") -> None:
        """Create the error.

        Args:
            message: Sentence that states what is wrong with the request.
            param: Parameter of the request that is at fault; empty for none.
            status: HTTP status of the reply.
            code: Error code of the API; empty for none.
        """
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the HTTP reply that reports this error."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        error = {"message": str(self), "type": kind}
        return {"error": {**error, "param": self.param or None, "code": self.code or None}}


@dataclass(frozen=True)
class ChatCall:
    """A parsed and checked request of the chat API for one response of the policy.

    Attributes:
        messages: The conversation, after the message with the tools' descriptions if there are any.
        model: Name of the model in the request, which the reply repeats.
        calls_tools: Whether tool calls in the response are parsed (`tool_choice` is `auto`).
        logprobs: Whether the reply has the log-probabilities of the response's tokens.
        stream: Whether the reply is a stream of events.
        with_usage: Whether a streamed reply ends with the numbers of tokens.
        notices: Warnings about sampling parameters that differ from the run's settings.
        parallel_calls: Whether the program accepts several tool calls in one response. Otherwise it
            gets the first only.
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
        """The descriptions of the tools that the request offers, as JSON; empty if none."""
        return tools_of(self.messages)


@dataclass(frozen=True)
class ChatAnswer:
    """A response of the policy to a `ChatCall`, from which replies of the chat API are formatted.

    Attributes:
        name: ID of the response, unique among the responses of a run's episodes, and the same when
            the response is sent again.
        content: Text of the response without its tool calls.
        calls: Names and arguments of the tool calls in the response.
        truncated: Whether the response ended without a stop token.
        tokens: Number of tokens of the conversation before the response, and of the response.
        logprobs: Text and log-probability of each token of the response; None if not requested. A
            token that holds only part of a character has its bytes as lone surrogates
            (`surrogateescape`) in its text.
    """

    name: str
    content: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    truncated: bool = False
    tokens: tuple[int, int] = (0, 0)
    logprobs: tuple[tuple[str, float], ...] | None = None

    @property
    def message(self) -> Message:
        """The response as the assistant's message of a conversation."""
        arguments = [dict(arguments) for _, arguments in self.calls]
        return _assistant(self.content, self._calls(arguments))

    @property
    def finish(self) -> str:
        """The API's `finish_reason` of the response: `length`, `tool_calls` or `stop`."""
        if self.truncated:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def _calls(self, arguments: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the response's tool calls as the API formats them, with `arguments` as arguments.

        `arguments` has one value for each call: an object for chat templates, or JSON text for the
        API.
        """
        named = zip(self.calls, arguments, strict=True)
        functions = [{"name": name, "arguments": value} for (name, _), value in named]
        return [
            {"id": f"call_{self.name}-{number}", "type": "function", "function": function}
            for number, function in enumerate(functions)
        ]

    def _sent_calls(self) -> list[dict[str, Any]]:
        return self._calls([json_text(arguments) for _, arguments in self.calls])

    def _usage(self) -> dict[str, int]:
        before, made = self.tokens
        return {"prompt_tokens": before, "completion_tokens": made, "total_tokens": before + made}

    def _choice(self, **fields: Any) -> dict[str, Any]:
        return {"index": 0, "finish_reason": None, "logprobs": None, **fields}

    def _logprobs(self) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        content = []
        for text, logprob in self.logprobs:
            encoded = text.encode(errors="surrogateescape")
            token = {"token": encoded.decode(errors="replace"), "logprob": logprob}
            content.append({**token, "bytes": list(encoded), "top_logprobs": []})
        return {"content": content, "refusal": None}

    def completion(self, model: str, created: int) -> dict[str, Any]:
        """Return the JSON body of the API's reply that has the whole response (not a stream).

        `created` is a Unix time in seconds.
        """
        calls = {"tool_calls": self._sent_calls()} if self.calls else {}
        message = {"role": "assistant", "content": self.content, "refusal": None, **calls}
        ended = {"finish_reason": self.finish, "logprobs": self._logprobs()}
        head = self._head("chat.completion", model, created)
        return {**head, "choices": [self._choice(message=message, **ended)], "usage": self._usage()}

    def chunks(self, model: str, created: int, *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the JSON bodies of the events in which the API streams the response.

        `created` is a Unix time in seconds. With `with_usage`, the last event has the numbers of
        tokens.
        """
        head = self._head("chat.completion.chunk", model, created)
        first, text = {"role": "assistant", "content": ""}, self.content
        yield {**head, "choices": [self._choice(delta=first, logprobs=self._logprobs())]}
        for at in range(0, len(text), _CHUNK):
            yield {**head, "choices": [self._choice(delta={"content": text[at : at + _CHUNK]})]}
        for number, call in enumerate(self._sent_calls()):
            delta = {"tool_calls": [{"index": number, **call}]}
            yield {**head, "choices": [self._choice(delta=delta)]}
        yield {**head, "choices": [self._choice(delta={}, finish_reason=self.finish)]}
        if with_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _head(self, kind: str, model: str, created: int) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.name}", "object": kind, "created": created, "model": model}


def model(created: int, name: str) -> dict[str, Any]:
    """Return the JSON body of the API's reply that describes the model `name`.

    `created` is a Unix time in seconds.
    """
    return {"id": name, "object": "model", "created": created, "owned_by": "megatron-async"}


def models(created: int, name: str) -> dict[str, Any]:
    """Return the JSON body of the API's list of models, whose only entry is the model `name`.

    `created` is a Unix time in seconds.
    """
    return {"object": "list", "data": [model(created, name)]}


def tools_of(messages: Sequence[Message]) -> str:
    """Return the descriptions of the tools that a conversation offers, as JSON; empty if none."""
    return messages[0]["content"] if messages and messages[0]["role"] == TOOLS_ROLE else ""


def checked_call(body: Any, sampling: SamplingConfig) -> ChatCall:
    """Parse and check the body of a chat request; `sampling` are the run's settings.

    Raises:
        CallRefused: A parameter of the request is missing, invalid or cannot be honored.
    """
    if not isinstance(body, dict):
        raise CallRefused(f"the body is {short_repr(body)}; it must be a JSON object")
    parameters = {name: value for name, value in body.items() if value is not None}
    _refuse_unknown(parameters)
    for name in _SWITCHES:
        if not isinstance(parameters.get(name, False), bool):
            raise CallRefused(
                f"{name} is {short_repr(parameters[name])}; it must be true or false", name
            )
    for name, (_, valid) in _SAMPLING.items():
        try:
            if name in parameters:
                valid.validate_python(parameters[name])
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise CallRefused(f"{name} is {short_repr(parameters[name])}: {why}", name) from error
    messages = parameters.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CallRefused(
            f"messages is {short_repr(messages)}; it must be a list of at least one message",
            "messages",
        )
    read = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    tools = _tools(parameters.get("tools", []))
    choice = parameters.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise CallRefused(
            f"tool_choice is {short_repr(choice)}; it must be auto or none, since the policy "
            "itself decides whether it calls a tool",
            "tool_choice",
        )
    options = parameters.get("stream_options", {})
    return ChatCall(
        (*tools, *read),
        str(parameters.get("model", "policy")),
        choice == "auto",
        parameters.get("logprobs", False),
        parameters.get("stream", False),
        isinstance(options, dict) and options.get("include_usage") is True,
        tuple(_notices(parameters, sampling)),
        parameters.get("parallel_tool_calls", True),
    )


def _refuse_unknown(parameters: Mapping[str, Any]) -> None:
    """Raise CallRefused for the first parameter of a request that is unknown or not supported."""
    for name, value in parameters.items():
        if name in _NEUTRAL:
            # In Python True equals 1, but `n: true` is not a number.
            if isinstance(value, bool) or value not in _NEUTRAL[name]:
                best = _NEUTRAL[name][0]
                raise CallRefused(
                    f"{name} is {short_repr(value)}, which cannot be honored while training; "
                    f"remove it, or set it to {json_text(best)}",
                    name,
                )
        elif name not in _READ | _IGNORED | _SAMPLING.keys() and name not in _WITHOUT_EFFECT:
            raise CallRefused(
                f"{name} is {short_repr(value)}, but this API has no such parameter; remove it",
                name,
            )


def _notices(parameters: Mapping[str, Any], sampling: SamplingConfig) -> Iterator[str]:
    """Yield a warning for each parameter of a request that is not used as the program requests."""
    for name, value in parameters.items():
        if name in _WITHOUT_EFFECT:
            yield f"an agent sets {name}, which has no effect"
        elif name in _SAMPLING:
            setting, _ = _SAMPLING[name]
            used = getattr(sampling, setting)
            if value != used:
                yield (
                    f"an agent sets another {name}; the run's sampling.{setting} {used:g} is used"
                )


def _message(message: Any, where: str) -> Message:
    """Convert a message of a request to the form of chat templates; `where` names it in errors."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise CallRefused(
            f"{where} is {short_repr(message)}; it must have a role of {', '.join(_ROLES)}",
            "messages",
        )
    for odd in ("audio", "function_call"):
        if message.get(odd) is not None:
            raise CallRefused(f"{where} has {odd!r}, which is not supported; remove it", "messages")
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
    """Return a message's content as text; raise CallRefused for images, audio and files."""
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
    """Return the `tool_calls` of an assistant's message with their arguments parsed from JSON."""
    parsed: list[Mapping[str, Any]] = []
    try:
        for call in calls:
            sent = call["function"]
            function = {"name": str(sent["name"]), "arguments": _arguments(sent["arguments"])}
            parsed.append({"id": str(call["id"]), "type": "function", "function": function})
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise CallRefused(
            f"{where} has the tool_calls {short_repr(calls)}; each must have an id and a function "
            "with a name and arguments, which are a JSON object as text, nested at most "
            f"{MAX_NESTED} times",
            "messages",
        ) from error
    return parsed


def _arguments(text: Any) -> dict[str, Any]:
    """Return the arguments of a tool call as an object; `text` is their JSON, or the object."""
    parsed = json.loads(text or "{}") if isinstance(text, str) else text
    if not isinstance(parsed, dict) or is_nested_deeply(parsed):
        raise ValueError("the arguments are not an object, or are nested too deeply")
    return parsed


def _tools(tools: Any) -> tuple[Message, ...]:
    """Return the message that describes the tools of a request; empty without tools."""
    if not isinstance(tools, list) or is_nested_deeply(tools):
        raise CallRefused(
            f"tools is {short_repr(tools)}; it must be a list, nested at most {MAX_NESTED} times",
            "tools",
        )
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or tool.get("type") != "function":
            raise CallRefused(
                f"tools has {short_repr(tool)}; each must be a function with a name", "tools"
            )
    return ({"role": TOOLS_ROLE, "content": json_text(tools)},) if tools else ()

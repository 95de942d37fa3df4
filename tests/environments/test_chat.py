"""Tests requests as the OpenAI SDK sends them, and replies in the form that its types require."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from megatron_async.config.data import DataConfig
from megatron_async.config.rollout import SamplingConfig
from megatron_async.environments.chat import (
    CallRefused,
    ChatAnswer,
    ChatCall,
    checked_call,
)
from megatron_async.environments.chat_codec import ChatCodec
from megatron_async.environments.conversation import Conversation
from tests.environments.byte_tokenizers import (
    byte_level,
    byte_tokenizer,
)

SAMPLING = SamplingConfig(max_new_tokens=16)
REQUEST: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
RESPONSES = {
    "text": ChatAnswer("3-0", "x" * 70, tokens=(5, 7)),
    "nothing": ChatAnswer("3-0", ""),
    "cut off": ChatAnswer("3-0", "and", truncated=True),
    "calls": ChatAnswer("3-1", "", (("add", {"a": 1}), ("add", {}))),
    "log-probs": ChatAnswer("3-2", "ab", logprobs=(("a", -0.5), ("\ufffd", -1.0))),
}


@pytest.mark.parametrize("which", RESPONSES)
def test_completion_has_the_form_of_the_sdk_types(which: str) -> None:
    answer = RESPONSES[which]
    body = json.loads(json.dumps(answer.completion("policy", 7)))
    completion = ChatCompletion.model_validate(body, strict=True)
    (choice,) = completion.choices
    assert choice.message.content == answer.content
    assert choice.finish_reason == answer.finish
    found = choice.message.tool_calls or []
    made = [(c.function.name, json.loads(c.function.arguments)) for c in found]  # type: ignore[union-attr]
    assert made == list(answer.calls)
    assert completion.usage is not None
    assert completion.usage.total_tokens == sum(answer.tokens)
    assert (choice.logprobs is None) == (answer.logprobs is None)
    if answer.logprobs is not None:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [(t.token, t.logprob) for t in choice.logprobs.content] == list(answer.logprobs)


@pytest.mark.parametrize("which", RESPONSES)
def test_stream_events_add_up_to_the_response(which: str) -> None:
    answer = RESPONSES[which]
    bodies = json.loads(json.dumps(list(answer.chunks("policy", 7, with_usage=True))))
    chunks = [ChatCompletionChunk.model_validate(body, strict=True) for body in bodies]
    *pieces, usage = chunks
    assert usage.usage is not None and usage.usage.completion_tokens == answer.tokens[1]
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == answer.content
    assert [c.choices[0].finish_reason for c in pieces][-1] == answer.finish
    calls = [call for c in pieces for call in c.choices[0].delta.tool_calls or []]
    made = [(c.function.name, json.loads(c.function.arguments or "")) for c in calls if c.function]
    assert made == list(answer.calls)
    assert [call.index for call in calls] == list(range(len(calls)))
    assert {c.id for c in chunks} == {f"chatcmpl-{answer.name}"}


def test_response_is_parsed_as_the_same_message_when_it_is_sent_back() -> None:
    for answer in RESPONSES.values():
        message = answer.completion("policy", 7)["choices"][0]["message"]
        body = {"messages": [*REQUEST["messages"], {**message, "annotations": None}]}
        assert checked_call(body, SAMPLING).messages[1] == answer.message


REFUSED: dict[str, tuple[Any, str]] = {
    "not an object": ([], "it must be a JSON object"),
    "no messages": ({}, "messages is None; it must be a list of at least one message"),
    "role": (
        {"messages": [{"role": "owner", "content": ""}]},
        r"messages\[0\] is .*; it must have",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "cannot be shown to the policy",
    ),
    "n": ({**REQUEST, "n": 2}, "n is 2, which cannot be honored while training; .* or set it to 1"),
    "stop": ({**REQUEST, "stop": ["\n"]}, "stop is "),
    "format": ({**REQUEST, "response_format": {"type": "json_object"}}, "response_format is"),
    "unknown": (
        {**REQUEST, "guided_json": {}},
        "guided_json is {}, but this API has no such parameter",
    ),
    "required": (
        {**REQUEST, "tools": [TOOL], "tool_choice": "required"},
        "tool_choice is 'required'",
    ),
    "n is a bool": ({**REQUEST, "n": True}, "n is True, which cannot be honored"),
    "stream": ({**REQUEST, "stream": "yes"}, "stream is 'yes'; it must be true or false"),
    "tools": (
        {**REQUEST, "tools": [{"type": "web_search"}]},
        "each must be a function with a name",
    ),
    "calls": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "[1"}}],
                }
            ]
        },
        r"messages\[0\] has the tool_calls",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_request_is_refused_when_a_parameter_cannot_be_honored(what: str) -> None:
    body, sentence = REFUSED[what]
    with pytest.raises(CallRefused, match=sentence) as refused:
        checked_call(body, SAMPLING)
    assert refused.value.status == 400
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


def test_request_is_accepted_when_parameters_have_values_without_effect() -> None:
    body = {
        **REQUEST,
        "n": 1,
        "stop": None,
        "logit_bias": {},
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "temperature": 1,
        "max_tokens": 16,
        "user": "me",
        "tools": None,
    }
    assert checked_call(body, SAMPLING) == checked_call(REQUEST, SAMPLING)
    assert checked_call(REQUEST, SAMPLING).notices == ()


def test_request_has_a_notice_when_its_sampling_differs_from_the_run() -> None:
    call = checked_call({**REQUEST, "temperature": 0.2, "max_tokens": 5, "seed": 1}, SAMPLING)
    assert call.notices == (
        "an agent sets another temperature; the run's sampling.temperature 1 is used",
        "an agent sets another max_tokens; the run's sampling.max_new_tokens 16 is used",
        "an agent sets seed, which has no effect",
    )
    again = checked_call({**REQUEST, "temperature": 0.3, "max_tokens": 6, "seed": 2}, SAMPLING)
    assert again.notices == call.notices, "a notice does not name the request's value"


def test_request_is_parsed_to_the_form_of_chat_templates() -> None:
    asked = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [asked], "refusal": None},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ],
        "tools": [TOOL],
        "tool_choice": "none",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    call = checked_call(body, SAMPLING)
    assert call.messages == (
        {"role": "tools", "content": json.dumps([TOOL])},
        {"role": "system", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**asked, "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    )
    assert json.loads(call.tools) == [TOOL]
    assert (call.calls_tools, call.stream, call.with_usage) == (False, True, True)


def test_tool_arguments_and_schemas_are_literal_when_they_are_not_ascii() -> None:
    answer = ChatAnswer("3-1", "", (("add", {"city": "東京 😀", "half": "\udfff"}),))
    [call] = answer.completion("policy", 7)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "東京 😀", "half": "\\udfff"}'
    streamed = [
        call["function"]["arguments"]
        for chunk in answer.chunks("policy", 7, with_usage=False)
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert streamed == [call["function"]["arguments"]]
    tool = {"type": "function", "function": {"name": "add", "description": "Größe 😀"}}
    asked = checked_call({**REQUEST, "tools": [tool]}, SAMPLING)
    assert "Größe 😀" in asked.tools and json.loads(asked.tools) == [tool]


def test_made_up_response_has_zero_log_probs_when_a_program_requests_them() -> None:
    tokenizer = byte_tokenizer(byte_level)
    texts = ChatCodec(Conversation(DataConfig(), tokenizer, [tokenizer.eos_token_id]), None)
    ids = tokenizer.encode("hello", add_special_tokens=False)
    call = ChatCall(({"role": "user", "content": "?"},), logprobs=True)
    stored = texts.stored(call, ids, (), 3, ended=False)
    assert [number for _, number in stored["logprobs"]] == [0.0] * len(ids)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", True),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_p", False),
        ("top_k", 2.5),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 2.5),
        ("max_tokens", "16"),
        ("max_completion_tokens", -1),
    ],
)
def test_sampling_parameter_is_refused_when_the_api_does_not_permit_its_value(
    name: str, value: Any
) -> None:
    with pytest.raises(CallRefused, match=f"^{name} is ") as refused:
        checked_call({**REQUEST, name: value}, SAMPLING)
    assert refused.value.status == 400
    error = refused.value.body()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", name)


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_tokens": 1, "temperature": 0, "top_p": 1},
        {"max_completion_tokens": 10**9, "temperature": 2.0, "top_k": -1},
        {"max_tokens": None, "temperature": None},
    ],
)
def test_sampling_parameter_is_accepted_when_the_api_permits_its_value(parameters: Any) -> None:
    assert checked_call({**REQUEST, **parameters}, SAMPLING).messages == tuple(REQUEST["messages"])

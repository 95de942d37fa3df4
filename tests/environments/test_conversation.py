"""Tests the tokens that turns add to a branch: the chat template's tokens, and the policy's tokens
unchanged."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config.data import DataConfig
from megatron_async.environments.conversation import Conversation
from megatron_async.errors import UserError
from tests.environments.byte_tokenizers import (
    byte_fallback,
    byte_level,
    byte_tokenizer,
    unigram,
)
from tests.environments.templates import FAMILIES, family_tokenizer

TEXT = st.text("abc xyz.", min_size=1, max_size=12).map(str.strip).filter(bool)
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def conversation(family: str, **settings: Any) -> tuple[Conversation, Any, tuple[int, ...]]:
    tokenizer, stops = family_tokenizer(family)
    return Conversation(DataConfig(**settings), tokenizer, stops), tokenizer, stops


@pytest.mark.parametrize("family", FAMILIES)
@given(asked=st.lists(TEXT, min_size=1, max_size=5), answers=st.lists(TEXT, min_size=5, max_size=5))
def test_turns_join_to_the_tokens_of_the_whole_conversation(
    family: str, asked: list[str], answers: list[str]
) -> None:
    """Each template renders earlier turns unchanged, so the turns join to the whole rendering."""
    turns, tokenizer, stops = conversation(family)
    messages = [{"role": "user", "content": asked[0]}]
    tokens = turns.opening(messages).tolist()
    for answer, observation in zip(answers, asked[1:], strict=False):
        tokens += [*tokenizer.encode(answer, add_special_tokens=False), stops[0]]
        new = [{"role": "user", "content": observation}]
        tokens += turns.next(new, ended=True).tolist()
        messages += [{"role": "assistant", "content": answer}, *new]
    assert tokens == turns.opening(messages).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_next_adds_the_end_of_a_response_only_when_the_policy_wrote_none(family: str) -> None:
    turns, _, stops = conversation(family)
    new = [{"role": "user", "content": "more"}]
    cut, ended = turns.next(new, ended=False), turns.next(new, ended=True)
    assert cut[0] == stops[0]
    np.testing.assert_array_equal(cut[1:], ended)


@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_next_keeps_a_stop_token_when_it_is_part_of_an_observation(family: str) -> None:
    """A stop token in an observation does not end the response before it."""
    turns, tokenizer, _ = conversation(family)
    text = tokenizer.decode(turns.next([{"role": "user", "content": "a<|im_end|>b"}], ended=True))
    assert "a<|im_end|>b<|im_end|>" in text


def test_branch_keeps_earlier_thinking_when_the_template_drops_it() -> None:
    turns, tokenizer, stops = conversation("qwen3")
    opening = [{"role": "user", "content": "2 + 3?"}]
    answer = "<think>\nhm\n</think>\n\n5"
    written = [*tokenizer.encode(answer, add_special_tokens=False), stops[0]]
    new = [{"role": "user", "content": "sure?"}]
    branch = [*turns.opening(opening), *written, *turns.next(new, ended=True)]
    assert "hm" in tokenizer.decode(branch)
    at_once = turns.opening([*opening, {"role": "assistant", "content": answer}, *new])
    assert "hm" not in tokenizer.decode(at_once)
    turns.check(opening, ["user"])


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", ""])
@given(asked=TEXT, answer=TEXT)
def test_next_adds_the_same_tokens_as_the_renderers_library(
    role: str, end: str, asked: str, answer: str
) -> None:
    """The library `renderers` has code for Qwen3's turns, and accepts either stop token."""
    renderers = pytest.importorskip("renderers")
    turns, tokenizer, stops = conversation("qwen3")
    marks = [f"<{slash}{name}>" for name in ("tool_call", "think") for slash in ("", "/")]
    tokenizer.add_tokens([*marks, "<tool_response>", "</tool_response>"], special_tokens=False)
    opening = turns.opening([{"role": "user", "content": "2 + 3?"}]).tolist()
    written = tokenizer.encode(f"<think>\nhm\n</think>\n\n{answer}{end}")
    new = [{"role": role, "content": asked}]
    qwen3 = importlib.import_module("renderers.qwen3").Qwen3Renderer(tokenizer)
    bridged = qwen3.bridge_to_next_turn(opening, written, new)
    # The library renders the conversation again after a user's message, since the template drops
    # earlier thinking.
    if bridged is None:
        assert role == "user"
        return
    ended = written[-1] in stops
    branch = [*opening, *written, *turns.next(new, ended=ended)]
    assert branch == list(bridged.token_ids), renderers.__file__


def test_answer_text_is_the_response_without_its_stop_token() -> None:
    turns, tokenizer, stops = conversation("qwen3")
    ids = tokenizer.encode("five", add_special_tokens=False)
    assert turns.answer_text([*ids, stops[0]]) == turns.answer_text(ids) == "five"


def test_answer_text_keeps_special_tokens_unless_the_setting_skips_them() -> None:
    tokenizer, stops = family_tokenizer("llama3_1")
    ids = [*tokenizer.encode("<|python_tag|>x", add_special_tokens=False), stops[0]]
    whole, skips = "<|python_tag|>x", DataConfig(skip_special_tokens=True)
    assert Conversation(DataConfig(), tokenizer, stops).answer_text(ids) == whole
    assert Conversation(skips, tokenizer, stops, calls=True).answer_text(ids) == whole
    assert Conversation(skips, tokenizer, stops).answer_text(ids) == "x"


@pytest.mark.parametrize(
    ("family", "accepted"),
    [("qwen2_5", True), ("qwen3", True), ("llama3_1", True)]
    + [(family, False) for family in ("plain", "smollm2", "llama3", "gemma3")],
)
def test_conversation_check_refuses_a_template_that_leaves_out_tools(
    family: str, accepted: bool
) -> None:
    tokenizer, stops = family_tokenizer(family)
    turns = Conversation(DataConfig(), tokenizer, stops, [TOOL])
    opening = [{"role": "user", "content": "6 times 7?"}]
    if accepted:
        turns.check(opening, ["tool"])
        return
    with pytest.raises(
        UserError, match=r"leaves out the tools .*\. Use a model whose template shows"
    ):
        turns.check(opening, ["tool"])


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ messages[0].content }}", "leaves out a response that later messages follow"),
        (
            "{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}",
            "leaves out a message of role 'user'",
        ),
        (
            "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}",
            "renders a message of role 'user' differently after more turns",
        ),
        ("{{ raise_exception('no') }}", "fails for messages of user"),
    ],
)
def test_conversation_check_refuses_a_template_that_fails_for_several_turns(
    template: str, sentence: str
) -> None:
    tokenizer, stops = family_tokenizer("smollm2")
    tokenizer.chat_template = template
    turns = Conversation(DataConfig(), tokenizer, stops)
    with pytest.raises(UserError, match=sentence):
        turns.check([{"role": "user", "content": "hi"}], ["user"])


def test_conversation_refuses_a_text_when_the_model_lacks_one_of_its_tokens() -> None:
    tokenizer, stops = family_tokenizer("qwen2_5")
    lacking = tokenizer.add_tokens(["<new>"]) and len(tokenizer) - 1
    turns = Conversation(DataConfig(), tokenizer, stops, vocabulary=lacking)
    turns.opening([{"role": "user", "content": "old"}])
    with pytest.raises(UserError, match=rf"the token '<new>' \({lacking}\), and the model has"):
        turns.next([{"role": "user", "content": "a <new> one"}], ended=True)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, unigram])
@given(
    text=st.text("abe lo.東京都😀👩ïß\n", max_size=20)
    | st.sampled_from(["hello 👩‍👩‍👧", " a", "\ufffd東"])
)
def test_token_texts_join_to_the_text_when_tokens_split_a_character(make: Any, text: str) -> None:
    tokenizer = byte_tokenizer(make)
    turns = Conversation(DataConfig(), tokenizer, [tokenizer.eos_token_id])
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    texts = turns.token_texts(ids)
    assert len(texts) == len(ids)
    joined = b"".join(text.encode(errors="surrogateescape") for text in texts)
    assert joined == turns.answer_text(ids).encode()


@pytest.mark.parametrize(
    ("make", "tokens", "expected"),
    [
        (byte_level, ["ð", "Ł", "ĺ", "Ģ"], [b"\xf0", b"\x9f", b"\x98", b"\x80"]),
        (byte_level, ["æ", "a", "Ŀ"], [b"\xe6", b"a", b"\x9d"]),
        (byte_fallback, ["<0xE6>", "<0x9D>", "<0xB1>", "▁he"], [b"\xe6", b"\x9d", b"\xb1", b" he"]),
        (
            byte_fallback,
            ["\ufffd", "<0xff>".upper().replace("X", "x"), "a"],
            [b"\xef\xbf\xbd", b"\xff", b"a"],
        ),
        (unigram, ["▁hello", "<0xF0>", "▁hello", "<0x0A>"], [b"hello", b"\xf0", b" hello", b"\n"]),
    ],
)
def test_token_texts_have_the_bytes_when_a_character_is_incomplete(
    make: Any, tokens: list[str], expected: list[bytes]
) -> None:
    tokenizer = byte_tokenizer(make)
    turns = Conversation(DataConfig(), tokenizer, [tokenizer.eos_token_id])
    texts = turns.token_texts(tokenizer.convert_tokens_to_ids(tokens))
    assert [text.encode(errors="surrogateescape") for text in texts] == expected

"""Tests calls of users' environments, with `step` or with tools, and the faults of user code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.environments import Answer, Step
from megatron_async.environments.environment_runner import (
    EnvironmentRunner,
    Threads,
    environment_builder,
)
from megatron_async.environments.interface import MAX_OBSERVATION, EnvironmentFault
from megatron_async.environments.tools import CallReader, described
from megatron_async.errors import UserError

PROMPT = ({"role": "user", "content": "6 times 7? "},)


class Calculator:
    def reset(self, **row: Any) -> None:
        pass

    def multiply(self, a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first.
            b: The second.
        """
        return a * b

    async def divide(self, a: int, b: int) -> float:
        """Divide two integers.

        Args:
            a: The first.
            b: The second.
        """
        await asyncio.sleep(0)
        return a / b


class AsTRLHasIt:
    """A class in the form of TRL's environments: no arguments, tools as documented methods."""

    def __init__(self) -> None:
        self.client = time.monotonic
        self.reward: Any = 0.0

    @property
    def board(self) -> str:
        raise RuntimeError("no game has started")

    def reset(self, **kwargs: Any) -> str | None:
        self.reward = 0.0
        return "The word has 5 letters."

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: The word.

        Returns:
            The game's hint.
        """
        self.reward = np.float32(1.0)
        return "right"


@pytest.fixture
def threads() -> Iterator[Threads]:
    pool = Threads(2)
    yield pool
    pool.close()


def runner_of(cls: Any, threads: Threads, seconds: float = 5.0) -> EnvironmentRunner:
    return EnvironmentRunner(cls, f"own.py:{cls.__name__}", threads, seconds)


def qwen_call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def calls_of(threads: Threads, cls: Any, text: str) -> Any:
    async def play() -> Any:
        runner = runner_of(cls, threads)
        assert await runner.reset({}, PROMPT)
        return await runner.step(Answer(text), CallReader("qwen25", runner.schemas()))

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("text", "replies"),
    [
        (qwen_call('{"name": "multiply", "arguments": {"a": 6, "b": 7}}'), ["42"]),
        (qwen_call('{"name": "divide", "arguments": {"a": 1, "b": 2}}'), ["0.5"]),
        (
            qwen_call('{"name": "divide", "arguments": {"a": 1, "b": 0}}'),
            ["Error: ZeroDivisionError: division by zero"],
        ),
        (
            qwen_call('{"name": "multiply", "arguments": {"a": 6}}'),
            ["Error: multiply: missing a required argument: 'b'"],
        ),
        (
            qwen_call('{"name": "multiply", "arguments": [6, 7]}'),
            [
                "Error: the call cannot be read: the arguments of 'multiply' are [6, 7]; they "
                "must be an object"
            ],
        ),
        (
            qwen_call('{"name": "root", "arguments": {"a": 6}}'),
            ["Error: a call cannot be read, or its tool is none of: divide, multiply"],
        ),
        (
            qwen_call('{"name": "multiply", "argum'),
            ["Error: a call cannot be read, or its tool is none of: divide, multiply"],
        ),
        (
            qwen_call('{"name": "multiply", "arguments": {"a": 2, "b": 3}}')
            + qwen_call('{"name": "root", "arguments": {}}'),
            ["6", "Error: a call cannot be read, or its tool is none of: divide, multiply"],
        ),
    ],
)
def test_tool_results_or_errors_are_returned_for_every_call(
    threads: Threads, text: str, replies: Sequence[str]
) -> None:
    reply = calls_of(threads, Calculator, text)
    assert [message["content"] for message in reply.messages] == list(replies)
    assert {message["role"] for message in reply.messages} == {"tool"}
    assert not reply.done


WELL = '{"name": "multiply", "arguments": {"a": 6, "b": 7}}'
NAMELESS = WELL.replace("multiply", "root")
ALSO = '{"a": 6, "b": 7}'


def kimi(*calls: tuple[str, str]) -> str:
    marks = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    inner = "".join(marks.format(name, n, body) for n, (name, body) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def coder(*names: str) -> str:
    each = "<tool_call>\n<function={}>\n<parameter=a>\n6\n</parameter>\n</function>\n</tool_call>"
    return "".join(each.format(name) for name in names)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3", f"<|python_tag|>{WELL};{NAMELESS}"),
        ("mistral", f"[TOOL_CALLS] [{WELL}, {NAMELESS}]"),
        ("pythonic", "[multiply(a=6, b=7), root(a=6)]"),
        ("kimi_k2", kimi(("multiply", ALSO), ("root", ALSO))),
        ("kimi_k2", kimi(("multiply", ALSO), ("multiply", '{"a":'))),
        ("qwen3_coder", coder("multiply", "root")),
        ("qwen3_coder", coder("multiply") + "<tool_call>\n<function=multiply>\n<param"),
    ],
)
def test_call_reader_keeps_the_text_when_one_of_several_calls_is_not_readable(
    parser: str, text: str
) -> None:
    reader = CallReader(parser, described({"multiply": Calculator().multiply}, "Calculator"))
    rest, calls, complaint = reader.read(text)
    assert [call.name for call in calls] == ["multiply"]
    assert complaint == "Error: a call cannot be read, or its tool is none of: multiply"
    assert rest == text


@pytest.mark.parametrize(
    "body",
    [
        "null",
        "5",
        "[1, 2]",
        '"x"',
        "[" * 3000,
        '{"name": "multiply", "arguments": %s}',
        '{"name": "multiply", "arguments": {"a": 1, "b": %s}}',
    ],
)
def test_policy_reads_an_error_when_its_tool_call_is_malformed(threads: Threads, body: str) -> None:
    nested = "[" * 900 + "]" * 900
    reply = calls_of(threads, Calculator, qwen_call(body.replace("%s", nested)))
    assert all(message["content"].startswith("Error: ") for message in reply.messages)
    assert reply.messages
    assert not reply.done


def test_tool_result_can_be_encoded_when_it_has_a_lone_surrogate(threads: Threads) -> None:
    class Echo:
        def reset(self, **row: Any) -> None:
            pass

        def echo(self, text: str) -> str:
            """Repeat a text.

            Args:
                text: The text.
            """
            return text

    call = qwen_call('{"name": "echo", "arguments": {"text": "a\\ud800b"}}')
    assert [m["content"] for m in calls_of(threads, Echo, call).messages] == ["a?b"]


def test_policy_reads_an_error_when_a_tool_result_is_too_long(threads: Threads) -> None:
    class Long:
        def reset(self, **row: Any) -> None:
            pass

        def fill(self, count: int) -> str:
            """Write a long text.

            Args:
                count: Its characters.
            """
            return "x" * count

    def call(count: int) -> str:
        return qwen_call(f'{{"name": "fill", "arguments": {{"count": {count}}}}}')

    long, short = calls_of(threads, Long, call(MAX_OBSERVATION) + call(3)).messages
    assert long["content"] == (
        "Error: the result has 1,048,576 characters; at most 262,144 are shown"
    )
    assert short["content"] == "xxx"


def test_call_reader_never_raises_when_a_call_is_not_valid_json() -> None:
    """SGLang's parsers raise errors of many types for JSON that is not a call, as a number."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    written = ("7", "null", '"a"', "[7]", "[[]]", "{}", '{"name": 7}', '{"name": "multiply"', "x(")
    schemas = described({"multiply": Calculator().multiply}, "own.py:Calculator")
    raised = set()
    parsers = dict(FunctionCallParser.ToolCallParserEnum)
    parsers.pop("response_template", None)  # Cannot be created without the server's template.
    for name, detector in parsers.items():
        reader = CallReader(name, schemas)
        for inside in written:
            text = f"{detector().bot_token}{inside}{detector().eot_token}"
            rest, calls, wrong = reader.read(text)
            assert wrong == "" or rest == text, (name, text)
            if "cannot be read: " in wrong:
                raised.add(name)
            assert {call.name for call in calls} <= {"multiply"}, (name, text)
    assert "llama3" in raised


def test_tool_episode_ends_when_a_response_has_no_call(threads: Threads) -> None:
    reply = calls_of(threads, Calculator, "It is 42.")
    assert reply.done
    assert reply.messages == ()


async def test_runner_plays_a_class_written_for_trl(threads: Threads) -> None:
    runner = runner_of(AsTRLHasIt, threads)
    assert await runner.reset({}, PROMPT)
    assert list(runner.tools) == ["guess"]
    [opening] = await runner.reset({"anything": 1}, PROMPT)
    assert opening["content"] == "6 times 7? The word has 5 letters."
    reader = CallReader("qwen25", runner.schemas())
    call = qwen_call('{"name": "guess", "arguments": {"word": "crane"}}')
    reply = await runner.step(Answer(call), reader)
    assert [message["content"] for message in reply.messages] == ["right"]
    assert (await runner.step(Answer("Done."), reader)).done
    assert await runner.final_reward() == (1.0, {})


async def test_step_gets_parsed_calls_when_the_class_describes_no_tools(threads: Threads) -> None:
    class Board:
        def reset(self, **row: Any) -> str:
            return "Call move(square)."

        def step(self, answer: Answer) -> Step:
            seen.append(answer)
            return Step("go on")

    seen: list[Answer] = []
    two = [qwen_call(f'{{"name": "move", "arguments": {{"square": {n}}}}}') for n in (1, 2)]
    runner, reader = runner_of(Board, threads), CallReader("qwen25", ())
    await runner.reset({}, ())
    for text in ("So: " + "".join(two), "So.", "So: " + qwen_call('{"name": "mov')):
        await runner.step(Answer(text, turn=len(seen)), reader)
    called, plain, broken = seen
    assert [(c.name, dict(c.arguments)) for c in called.tool_calls] == [
        ("move", {"square": 1}),
        ("move", {"square": 2}),
    ]
    assert called.text.strip() == "So:"
    assert (plain.text, plain.tool_calls, plain.turn) == ("So.", (), 1)
    assert (broken.text, broken.tool_calls) == ("So: " + qwen_call('{"name": "mov'), ())


async def test_runner_passes_columns_of_any_name_to_reset_and_restore(threads: Threads) -> None:
    class Kept:
        def reset(self, method: str, **row: Any) -> str:
            return f"{method} {row['arguments']} {row['state']}"

        def step(self, answer: Answer) -> Step:
            return Step("go on")

        def state(self) -> bytes:
            return b"kept"

        def restore(self, state: bytes, method: str, **row: Any) -> None:
            assert (state, method, row) == (b"kept", "GET", {"arguments": 1})

    runner = runner_of(Kept, threads)
    row = {"method": "GET", "arguments": 1, "state": "Texas"}
    [opening] = await runner.reset(row, ())
    assert opening["content"] == "GET 1 Texas"
    await runner.restore(b"kept", row)  # `state` is the snapshot, not the row's column.


def hostile(reset: Any = None, step: Any = None, **methods: Any) -> Any:
    body = {
        "reset": lambda self, **row: "Begin." if reset is None else reset(),
        "step": lambda self, answer: Step("go on") if step is None else step(),
        **methods,
    }
    return type("Own", (), body)


def give_up() -> None:
    raise TimeoutError("the service is slow")


def boom() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (
            hostile(reset=boom),
            r"Own\.reset raised ValueError: boom at .*test_environment_runner.py:\d+",
        ),
        (hostile(reset=lambda: 3), "Own.reset returned the observation 3; it must be text"),
        (hostile(reset=lambda: [{"role": "assistant", "content": "x"}]), "`role` of system"),
        (hostile(reset=lambda: [{"role": "user", "content": 3}]), "a text `content`"),
        (hostile(reset=lambda: "x" * (1 << 21)), "more than 1,048,576 characters"),
        (hostile(step=boom), "Own.step raised ValueError: boom"),
        (
            hostile(step=lambda: Step("\ud800")),
            "returned the message .*; a message must have a text",
        ),
        (hostile(step=lambda: "text"), "Own.step returned 'text'; it must be a Step"),
        (hostile(step=lambda: Step(reward=float("nan"))), "must be a finite number"),
        (hostile(step=lambda: Step([{**PROMPT[0], "x": "x" * (1 << 21)}])), "more than 1,048,576 "),
        (hostile(step=lambda: Step(reward=10**400)), "Step.reward: int too large"),
        (hostile(step=lambda: Step(reward=np.zeros(2))), "Step.reward: only "),  # type: ignore[arg-type]
        (hostile(step=lambda: Step(done=1)), "Step.done is 1; it must be a bool"),  # type: ignore[arg-type]
        (hostile(step=lambda: Step(parts={"mean": 1.0})), "is the name of a metric"),
        (hostile(step=lambda: time.sleep(1.0)), "Own.step took longer than 0.2 s"),
        (hostile(step=lambda: next(iter(()))), r"Own\.step raised StopIteration:"),
        (hostile(step=give_up), "Own.step raised TimeoutError: the service is slow"),
        (hostile(state=lambda self: "text", restore=boom), "Own.state returned 'text'"),
        (hostile(get_reward=lambda self: "1"), "Own.get_reward: the reward returned '1'"),
        (
            hostile(step=lambda: Step(reward=None)),  # type: ignore[arg-type]
            "Step.reward: the reward returned None; it must be a number, or .* to numbers$",
        ),
        (
            hostile(step=lambda: Step(parts={"won": "yes"})),  # type: ignore[dict-item]
            "returned 'yes' as 'won'; it must be a number$",
        ),
    ],
)
async def test_environment_fault_is_one_message_when_user_code_misbehaves(
    threads: Threads, cls: Any, sentence: str
) -> None:
    runner = runner_of(cls, threads, seconds=0.2)
    with pytest.raises(EnvironmentFault, match=sentence):
        await runner.reset({}, ())
        await runner.step(Answer("x"))
        await runner.state()
        await runner.final_reward()


async def test_snapshot_is_plain_bytes_when_state_returns_a_subclass(threads: Threads) -> None:
    own = type("Own", (bytes,), {})
    runner = runner_of(hostile(state=lambda self: own(b"kept"), restore=boom), threads)
    await runner.reset({}, ())
    assert type(await runner.state()) is bytes


def test_opening_of_a_class_of_tools_is_checked(threads: Threads) -> None:
    for opening, sentence in (("x" * (1 << 21), "more than 1,048,576"), ("\ud800", "the message")):
        cls = type("Own", (Calculator,), {"reset": lambda self, opening=opening: opening})
        with pytest.raises(EnvironmentFault, match=sentence):
            asyncio.run(runner_of(cls, threads).reset({}, PROMPT))


def test_reset_error_names_the_columns_when_the_row_lacks_an_argument(threads: Threads) -> None:
    class Misspelled:
        def reset(self, sead: int, **row: Any) -> str:
            return "Guess."

        def step(self, answer: Answer) -> Step:
            return Step(done=True)

    runner = runner_of(Misspelled, threads)
    with pytest.raises(EnvironmentFault, match=r"does not fit a row of level, seed: .*'sead'"):
        asyncio.run(runner.reset({"seed": 1, "level": 2}, ()))


def test_reset_must_return_an_opening_when_the_row_has_no_prompt(threads: Threads) -> None:
    runner = runner_of(Calculator, threads)
    with pytest.raises(EnvironmentFault, match="returned None, but the task's row has no prompt"):
        asyncio.run(runner.reset({}, ()))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [("Own = 3\n", "neither a class nor a function"), ("1 / 0\n", "ZeroDivisionError")],
)
def test_environment_builder_refuses_a_name_that_cannot_be_called(
    tmp_path: Path, code: str, sentence: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(code)
    with pytest.raises(UserError, match=sentence):
        environment_builder(f"{file}:Own", {})


class _Deck:
    def __init__(self, cards: list[int]) -> None:
        self.drawn = cards.pop()


def test_environment_builder_copies_the_arguments_for_every_object() -> None:
    build = environment_builder(f"{__name__}:_Deck", {"cards": [1, 2, 3]})
    assert [build().drawn for _ in range(3)] == [3, 3, 3]


def test_call_reader_check_refuses_an_unknown_parser() -> None:
    with pytest.raises(UserError, match=r"episode\.tool_parser is 'qwen99'; it must be one of"):
        CallReader("qwen99", []).check()
    with pytest.raises(UserError, match=r"tool_parser is 'response_template': .* is required"):
        CallReader("response_template", []).check()

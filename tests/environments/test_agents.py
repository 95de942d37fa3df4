"""Tests agents' episodes in a worker: real programs, the real OpenAI SDK, and a scripted policy.

Some programs make calls, conversations and ends that no careful program would make.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError

from megatron_async.commands.gateway import ServedPolicy, instructions
from megatron_async.config import build_config
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.environments.agents import AgentWorker
from megatron_async.environments.check import check_environment
from megatron_async.environments.gateway import Gateway
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.worker import EpisodeStart, StepResult
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.process_backends.host import new_loops
from megatron_async.rollout.responses import EnginePool
from megatron_async.trajectory.types import FinishReason, PolicyVersion, Turn
from tests.environments.templates import template_of

PROGRAMS = str(Path(__file__).parent / "agent_programs.py")
PAYLOAD = {"question": "ask?", "answer": "7", "metadata": {"seed": 3}, "messages": []}
INPUT_BUDGET = 1 << 30
SECONDS, LOOPS = 60, new_loops()
Policy = Callable[[int], str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_character_tokenizer(folder)
    return str(folder)


def worker_of(model: str, program: str, *, scored: bool = False, **settings: Any) -> AgentWorker:
    """Create a worker of a program in `agent_programs.py`, or of a command.

    `settings` are settings of `agent` and of `episode`. With `scored`, the run has a reward.
    """
    named = {} if "command" in settings else {"name": f"{PROGRAMS}:{program}"}
    own = {name: settings.pop(name) for name in ("command", "arguments") if name in settings}
    config = build_config(
        {
            "agent": {**named, **own},
            "episode": settings,
            "task": {"kind": "seeds"},
            "sampling": {"max_new_tokens": 16},
            **({"reward": "exact"} if scored else {}),
        }
    )
    return AgentWorker(config, model)


@dataclass
class Played:
    """An episode as a store would have it, with the tokens of each turn's input and response."""

    tokenizer: Any
    turns: list[Turn] = field(default_factory=list)
    tokens: list[tuple[list[int], list[int]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    ended: StepResult | None = None

    def opened(self, opened: EpisodeStart | StepResult, parent: int | None) -> None:
        assert opened.token_ids is not None
        number = len(self.turns)
        self.turns.append(Turn(number, parent, 0, opened.messages, state=opened.state))
        self.tokens.append((list(opened.token_ids), []))
        self.notices += opened.notices

    def answer(self, text: str, *, cut: bool = False) -> list[int]:
        """Record a response of the policy to the newest turn, and return its tokens.

        With `cut`, the response does not end with a stop token.
        """
        ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        ids += [] if cut else [self.tokenizer.eos_token_id]
        self.tokens[-1] = (self.tokens[-1][0], ids)
        self.turns[-1] = replace(self.turns[-1], end=FinishReason.STOP)
        return ids

    def stepped(self, stepped: StepResult) -> None:
        newest = replace(self.turns[-1], answer=stepped.answer, reward=stepped.reward, state=None)
        self.turns[-1] = newest
        for name, count in stepped.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        if stepped.ended is None:
            self.opened(stepped, stepped.parent)
        else:
            self.notices += stepped.notices
            self.ended = stepped

    def text(self, turn: int) -> str:
        """Return the text of a branch from its start to the end of the response of `turn`."""
        parent = self.turns[turn].parent
        before = "" if parent is None else self.text(parent)
        return before + str(self.tokenizer.decode([*self.tokens[turn][0], *self.tokens[turn][1]]))


async def play(
    worker: AgentWorker,
    policy: Policy,
    *,
    input_budget: int = INPUT_BUDGET,
    most: int = 100,
    key: str = "a.5.0",
    payload: Mapping[str, Any] = PAYLOAD,
) -> Played:
    played = Played(tokenizer_of(worker))
    played.opened(await worker.begin(key, payload), None)
    await continue_episode(worker, played, policy, input_budget=input_budget, most=most, key=key)
    return played


async def continue_episode(
    worker: AgentWorker,
    played: Played,
    policy: Policy,
    *,
    input_budget: int = INPUT_BUDGET,
    most: int = 100,
    key: str = "a.5.0",
    turns: int = 1000,
) -> None:
    while played.ended is None and turns:
        turns -= 1
        turn = len(played.turns) - 1
        ids = played.answer(policy(turn))
        last, logprobs = turn + 1 >= most, [-0.5] * len(ids)
        played.stepped(await worker.step(key, ids, turn, input_budget, last, logprobs))


def tokenizer_of(worker: AgentWorker) -> Any:
    return worker._codecs._conversation.args[1]


def worker_with_tools(model: str, program: str, **settings: Any) -> AgentWorker:
    """Create a worker whose chat template shows tools and whose parser reads tool calls."""
    worker = worker_of(model, program, tool_parser="qwen25", **settings)
    tokenizer_of(worker).chat_template = template_of("qwen2_5")
    worker._codecs._cached.clear()
    return worker


async def begin_episode(worker: AgentWorker) -> Played:
    played = Played(tokenizer_of(worker))
    played.opened(await worker.begin("a.5.0", PAYLOAD), None)
    return played


async def test_agent_of_the_documentation_plays_turns_of_one_branch(model: str) -> None:
    played = await play(worker_of(model, "solve"), lambda turn: "77"[: 2 - turn])
    assert played.ended is not None
    assert (played.ended.ended, played.ended.reward) == ("stop", 1.0)
    assert [turn.parent for turn in played.turns] == [None, 0]
    assert played.text(1) == "ask?\n77<eos>\nNo. Try again.\n7<eos>"
    assert [turn.answer and turn.answer["text"] for turn in played.turns] == ["77", "7"]
    assert played.turns[1].messages == ({"role": "user", "content": "No. Try again."},)
    assert played.counts == {"turns_abandoned": 0}
    assert played.notices == []


async def test_agent_plays_when_it_is_a_blocking_function_or_a_command(model: str) -> None:
    played = await play(worker_of(model, "solve_in_a_thread"), lambda turn: "x")
    assert played.ended is not None
    assert (played.ended.reward, played.ended.answer["parts"]) == (0.5, {"turns": 2.0})
    command = worker_of(model, "", command=[sys.executable, PROGRAMS])
    played = await play(command, lambda turn: "x")
    assert played.ended is not None
    assert (played.ended.reward, played.ended.answer["parts"]) == (0.25, {"asked": 2.0})
    assert [turn.parent for turn in played.turns] == [None, None]
    assert played.counts["forks_repeated"] == 1


async def test_agent_gets_streamed_text_and_log_probs_of_the_stored_response(model: str) -> None:
    worker = worker_of(model, "streams", scored=True)
    played = await play(worker, lambda turn: "a long answer of many pieces, each of a few")
    assert played.ended is not None
    assert (played.ended.ended, played.ended.reward) == ("stop", 0.0)
    answer = played.turns[1].answer
    assert answer is not None and len(answer["logprobs"]) == len(played.tokens[1][1])


async def test_agent_call_is_one_turn_when_the_sdk_retries_it(model: str) -> None:
    worker = worker_of(model, "impatient")
    played = await begin_episode(worker)
    await asyncio.sleep(0.5)  # Meanwhile the client's request times out, and it retries.
    await continue_episode(worker, played, str)
    assert played.ended is not None and played.ended.reward == 1.0
    assert [turn.parent for turn in played.turns] == [None, 0]
    assert played.counts["turns_abandoned"] == 0


async def test_agent_call_forks_when_it_repeats_only_part_of_a_streamed_response(
    model: str,
) -> None:
    played = await play(worker_of(model, "breaks_off"), lambda turn: "many words " * 40)
    assert played.ended is not None
    assert [turn.parent for turn in played.turns] == [None, None]
    assert played.counts["forks_answer"] == 1
    assert played.text(1).startswith("ask?\nm<eos>\non\n")
    assert played.ended.abandoned == ()


async def test_agent_gets_tool_calls_and_the_policy_gets_their_results(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 41}})
    worker = worker_with_tools(model, "uses_tools")
    texts = [f"let me see <tool_call>\n{call}\n</tool_call>", "<tool_call>{</tool_call>"]
    played = await play(worker, lambda turn: texts[turn])
    assert played.ended is not None and played.ended.reward == 1.0
    assert [turn.parent for turn in played.turns] == [None, 0], "the response was sent back"
    first, second = (turn.answer for turn in played.turns)
    assert first is not None and first["tool_calls"] == [{"name": "add", "arguments": {"a": 41}}]
    assert second is not None and second["tool_calls"] == []
    assert second["text"] == texts[1], "no character of an unreadable call is lost"
    assert '"name": "add"' in played.text(0)
    assert "<tool_response>\n42\n</tool_response>" in played.text(1)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("dies", [False, True])
async def test_agent_gets_only_the_first_tool_call_when_it_disables_parallel_calls(
    model: str, parallel: bool, dies: bool
) -> None:
    calls = "".join(
        f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': a}})}\n</tool_call>"
        for a in (41, 6)
    )

    asked = {"arguments": {"parallel": parallel}}
    worker = worker_with_tools(model, "uses_tools", **asked)
    played = await begin_episode(worker)
    if dies:  # The restored worker must use the stored options of the call.
        worker = worker_with_tools(model, "uses_tools", **asked)
        await worker.restore("a.5.0", PAYLOAD, played.turns)
    await continue_episode(worker, played, lambda turn: ("now " + calls, "done")[turn])
    assert played.ended is not None and played.ended.reward == (2.0 if parallel else 1.0)
    assert [turn.parent for turn in played.turns] == [None, 0], "the reply was sent back"
    assert played.turns[0].answer is not None
    assert played.turns[0].answer["text"] == "now " + calls
    assert len(played.turns[0].answer["tool_calls"]) == (2 if parallel else 1)
    assert f"now {calls}" in played.text(1), "the policy's own tokens are kept"
    assert ("<tool_response>\n7" in played.text(1)) == parallel


async def test_agent_call_with_tools_is_refused_when_no_parser_is_set(model: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"400.*episode.tool_parser is not set"):
        await worker_of(model, "uses_tools").begin("a.5.0", PAYLOAD)


@pytest.mark.parametrize("limit", ["turns", "context"])
async def test_agent_episode_ends_as_length_when_a_limit_is_reached(model: str, limit: str) -> None:
    worker = worker_of(model, "talks_on", arguments={"calls": 9}, max_turns=3)
    given = {"most": 3} if limit == "turns" else {"input_budget": 3}
    played = await play(worker, str, **given)
    assert played.ended is not None
    assert (played.ended.ended, played.ended.reward) == ("length", 0.0)
    assert len(played.turns) == (3 if limit == "turns" else 1)


async def test_agent_warning_names_the_first_change_when_every_call_forks(
    model: str,
) -> None:
    played = await play(worker_of(model, "rewrites"), lambda turn: f"abc{turn}")
    assert played.counts["forks_answer"] == 3
    (notice,) = played.notices
    assert re.search(r"each of the 4 calls .* message 1: .*ABC0.* was .*abc0", notice)


FAULTS = {
    "calls_nobody": "ended without a call to the policy",
    "raises": r"raises' raised ValueError: no good with \(key\) at .*agent_programs.py:\d+",
    "asks_for_two": r"raised BadRequestError: .*n is 2.* at .*agent_programs.py:\d+$",
    "wants_more": "does not fit a row of .*prompt.*: missing a required argument: 'level'",
    "quits": r"raised SystemExit: 3 at .*agent_programs.py:\d+$",
    "runs_dry": r"raised RuntimeError: coroutine raised StopIteration at .*agent_programs.py$",
    "runs_dry_in_a_thread": r"raised StopIteration:  at .*agent_programs.py:\d+$",
    "cancels_itself": "canceled its own task",
    "sleeps": r"neither called the policy nor ended for 0.2 s \(episode.step_seconds\)",
}


@pytest.mark.parametrize("program", FAULTS)
async def test_agent_fault_is_one_message_when_the_program_fails(model: str, program: str) -> None:
    worker = worker_of(model, program, step_seconds=0.2 if program == "sleeps" else 30.0)
    with pytest.raises(EnvironmentFault, match=FAULTS[program]):
        await worker.begin("a.5.0", PAYLOAD)
    await worker.forget("a.5.0")


async def test_agent_command_error_has_a_remedy_when_it_cannot_be_started(
    model: str, tmp_path: Path
) -> None:
    (tmp_path / "play.sh").write_text("#!/bin/sh\n")
    for command in (str(tmp_path / "play.sh"), "a-program-that-is-not-there"):
        with pytest.raises(EnvironmentFault, match=r"cannot be started: .*PATH.*chmod"):
            await worker_of(model, "", command=[command]).begin("a.5.0", PAYLOAD)


async def test_agent_may_return_none_only_when_a_reward_is_set(model: str) -> None:
    with pytest.raises(EnvironmentFault, match="returned None, but `reward` is not set"):
        await play(worker_of(model, "returns_nothing"), str)
    played = await play(worker_of(model, "returns_nothing", scored=True), str)
    assert played.ended is not None and played.ended.reward == 0.0


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import sys; sys.exit('no luck')", "ended with exit code 1: no luck"),
        ("import sys; sys.exit(400 * 'x' + '\\nlast line')", r"exit code 1: last line$"),
        (
            "import sys; sys.exit('RangeError: Out of memory\\nat a frame')",
            r"at a frame; episode\.memory_mib limits its address space to 4096 MiB more than",
        ),
        ("print('a lot')", "printed 'a lot' as its last line; that line must be the reward"),
        ("import os; print(os.environ['OPENAI_API_KEY'])", r"printed '\(key\)' as its last line"),
        ("import os, sys; sys.exit(os.environ['OPENAI_API_KEY'] + 280 * 'x')", r": \(key\)x{280}$"),
        ("import os; raise ValueError(os.environ['OPENAI_API_KEY'])", r"ValueError: \(key\)$"),
    ],
)
async def test_agent_command_fault_is_one_message_when_the_command_fails(
    model: str, code: str, sentence: str
) -> None:
    worker = worker_of(model, "", command=[sys.executable, "-c", code])
    with pytest.raises(EnvironmentFault, match=sentence):
        await worker.begin("a.5.0", PAYLOAD)


LEAVES = """
import subprocess, sys
left = subprocess.Popen(["sleep", "300"], start_new_session=True)
open(sys.argv[1], "w").write(str(left.pid))
"""


async def test_agent_command_ends_when_its_child_keeps_the_outputs_open(
    model: str, tmp_path: Path
) -> None:
    file = tmp_path / "left"
    worker = worker_of(model, "", command=[sys.executable, "-S", "-c", LEAVES, str(file)])
    try:
        with pytest.raises(
            EnvironmentFault, match="printed nothing or null, but `reward` is not set"
        ):
            await asyncio.wait_for(worker.begin("a.5.0", PAYLOAD), 50)
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)  # The child keeps the outputs open.
        await asyncio.sleep(0.5)


def test_agent_command_logs_no_error_when_its_episode_is_forgotten(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        worker = worker_of(model, "", command=[sys.executable, PROGRAMS])
        await worker.begin("a.5.0", PAYLOAD)
        await worker.forget("a.5.0")
        gc.collect()  # asyncio logs exceptions of collected futures that were never retrieved.

    asyncio.run(asyncio.wait_for(body(), 60))
    assert "environments/programs.py" not in caplog.text


def test_agent_function_is_refused_at_load_when_its_arguments_do_not_fit(model: str) -> None:
    with pytest.raises(UserError, match=r"does not accept the argument 'base_url'"):
        worker_of(model, "user")
    with pytest.raises(UserError, match=r"agent\.arguments has 'calls', which .* does not accept"):
        worker_of(model, "solve_in_a_thread", arguments={"calls": 3})


# ---------------------------------------------------------------- restored


def restored(played: Played, tokens: int) -> Sequence[Turn]:
    """Return the stored turns of an episode whose newest response has no stored reply yet.

    `tokens` is the number of tokens of the newest turn's branch, without its response.
    """
    state = json.dumps({"tokens": tokens}).encode()
    return (*played.turns[:-1], replace(played.turns[-1], state=state))


async def test_agent_gets_the_stored_responses_when_its_program_runs_again(
    model: str, tmp_path: Path
) -> None:
    log = tmp_path / "answers"
    settings: dict[str, Any] = {"arguments": {"log": str(log), "calls": 4}}
    first = worker_of(model, "talks_on", **settings)
    played = await begin_episode(first)
    await continue_episode(first, played, lambda turn: f"first {turn}", turns=2)
    assert len(played.turns) == 3
    second = worker_of(model, "talks_on", **settings)
    tokens_before = sum(len(ids) for pair in played.tokens for ids in pair)
    await second.restore("b.5.1", PAYLOAD, restored(played, tokens_before))
    await continue_episode(second, played, lambda turn: f"second {turn}", key="b.5.1")
    assert played.ended is not None and played.ended.reward == 1.0
    assert [turn.parent for turn in played.turns] == [None, 0, 1, 2]
    assert played.counts["turns_replayed"] == 2
    assert played.ended.abandoned == ()
    texts = [turn.answer["text"] for turn in played.turns if turn.answer]
    assert texts == ["first 0", "first 1", "second 2", "second 3"]
    tokens = played.turns[3].answer and played.turns[3].answer["tokens"]
    assert tokens == [sum(len(i) for p in played.tokens for i in p) - 9, 9]
    await first.forget("a.5.0")
    seen: dict[int, set[str]] = {}
    for line in log.read_text().splitlines():
        _, call, text = json.loads(line)
        seen.setdefault(call, set()).add(text)
    assert all(len(texts) == 1 for texts in seen.values()), "each call got only one response"


async def test_agent_trial_run_plays_an_episode_with_made_up_responses(model: str) -> None:
    found = await worker_of(model, "solve").trial_run(PAYLOAD)
    assert (found.opening, found.text) == (5, "ask?\n")
    assert found.observation == len("\nNo. Try again.\n")
    with pytest.raises(EnvironmentFault, match="no good with"):
        await worker_of(model, "raises").trial_run(PAYLOAD)


def test_agent_check_refuses_a_blocking_function_when_threads_are_too_few(model: str) -> None:
    agent = {"name": f"{PROGRAMS}:solve_in_a_thread"}
    schedule = {"groups_per_batch": 2, "group_size": 2, "concurrency": 4}
    episode = {"threads": 3}
    config = build_config(
        {"model": {"path": model}, "agent": agent, "episode": episode, "schedule": schedule}
    )
    sentence = "episode.workers x episode.threads is 3, but at least 4 episodes are open"
    with pytest.raises(UserError, match=sentence):
        check_environment(config, PAYLOAD, None)


def test_agent_check_error_names_the_program_once(model: str) -> None:
    agent = {"name": f"{PROGRAMS}:calls_nobody"}
    config = build_config({"model": {"path": model}, "agent": agent})
    with pytest.raises(UserError, match=r"^agent\.name '[^']*' ended without a call"):
        check_environment(config, PAYLOAD, None)


async def test_gateway_command_replies_to_each_call_separately(model: str) -> None:
    config = build_config({"model": {"path": model}, "sampling": {"max_new_tokens": 8}})
    simulated = SimulatedEngineModel(mean_length=100, step_seconds=0.0, max_sequence_tokens=100)
    engine = SimulatedEngine("engine", simulated)
    engine.set_weights(PolicyVersion(0, 0))
    gateway = Gateway(config.sampling)
    bound = socket.create_server(("127.0.0.1", 0))
    url = await gateway.start(bound)
    assert url == f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
    key = gateway.open(ServedPolicy(config, model, EnginePool(lambda: [engine])))
    shown = instructions(url, key)
    assert f"OPENAI_BASE_URL={url}" in shown and f"OPENAI_API_KEY={key}" in shown
    policy = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    ask = policy.chat.completions.create
    messages: Any = [{"role": "user", "content": "hello"}]
    replies = await asyncio.gather(
        *(ask(model="policy", messages=messages, logprobs=True) for _ in range(3))
    )
    assert len({reply.id for reply in replies}) == 3
    for reply in replies:
        assert reply.usage is not None and reply.usage.completion_tokens <= 8
        assert reply.choices[0].logprobs is not None
    with pytest.raises(BadRequestError, match="refused the prompt of 2") as refused:
        await ask(model="policy", messages=[{"role": "user", "content": "x" * 200}])
    assert refused.value.code == "context_length_exceeded", "as in a run"
    await gateway.close()


# ---------------------------------------------------------------- odd calls


HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def nested(levels: int) -> str:
    return '{"a": ' * levels + "{}" + "}" * levels


def tool(**parts: Any) -> str:
    function = {"name": "add", **parts}
    return json.dumps({**HELLO, "tools": [{"type": "function", "function": function}]})


def calling(arguments: str) -> str:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return json.dumps({"messages": [*HELLO["messages"], answer]})


BODIES = {
    "half of a surrogate pair": (r'{"messages": [{"role": "user", "content": "a \ud800 b"}]}', 200),
    "half of a surrogate pair in arguments": (calling(r'{"a": "\udfff"}'), 200),
    "arguments that Python cannot read": (calling("[" * 100_000), 400),
    "arguments that Python cannot write": (calling(nested(300)), 400),
    "deep arguments": (calling(nested(60)), 200),
    "a deep tool": (tool(parameters="-").replace('"-"', nested(300)), 400),
    "a tool without parameters": (tool(parameters=None), 200),
    "a name in another script": (tool(description="\N{SNOWMAN}"), 200),
    "a description that is a number": (tool(description=5), 400),
    "a tool whose strict is text": (tool(strict="perhaps"), 400),
}


@pytest.mark.parametrize("what", BODIES)
async def test_agent_episode_continues_when_a_call_has_an_odd_body(model: str, what: str) -> None:
    sent, status = BODIES[what]
    arguments = {"bodies": [sent, json.dumps(HELLO)]}
    worker = worker_with_tools(model, "sends", arguments=arguments)
    played = await play(worker, lambda turn: "yes")
    assert played.ended is not None and played.ended.ended == "stop"
    assert played.ended.answer["parts"] == {"status_0": status, "status_1": 200}
    assert len(played.turns) == (2 if status == 200 else 1)


async def test_agent_call_does_not_fork_when_it_has_fields_that_the_sdk_adds(model: str) -> None:
    played = await play(worker_of(model, "echoes"), lambda turn: "\N{SNOWMAN} \n" * turn)
    assert [turn.parent for turn in played.turns] == [None, 0, 1, 2]
    assert played.counts == {"turns_abandoned": 0}


async def test_agent_episode_ends_as_length_when_it_only_repeats_refused_calls(model: str) -> None:
    worker = worker_of(model, "asks_for_ever", max_turns=2, step_seconds=2.0)
    played = await play(worker, str, most=2)
    assert played.ended is not None
    assert (played.ended.ended, played.ended.reward) == ("length", 0.0)
    assert len(played.turns) == 2


async def test_agent_may_shorten_its_first_call_when_the_call_is_too_long(model: str) -> None:
    worker = worker_of(model, "shortens")
    opened = await worker.begin("a.5.0", PAYLOAD, 300)
    assert 150 < len(opened.token_ids) <= 300
    played = Played(tokenizer_of(worker))
    played.opened(opened, None)
    await continue_episode(worker, played, str)
    assert played.ended is not None
    assert (played.ended.ended, played.ended.reward) == ("length", 100.0)
    sentence = r"without a call to the policy that can be a turn: .* has 5 tokens; .* at most 4"
    with pytest.raises(EnvironmentFault, match=sentence):
        await worker_of(model, "solve").begin("a.5.0", PAYLOAD, 4)


async def test_agent_thread_is_free_again_when_its_episode_is_forgotten(model: str) -> None:
    worker = worker_of(model, "solve_in_a_thread", threads=1, step_seconds=25.0)
    for key in ("a.5.0", "b.6.0"):
        await worker.begin(key, PAYLOAD)  # From here on, the program's thread waits for a response.
        await worker.forget(key)


async def test_agent_key_is_revoked_when_its_episode_ends(model: str) -> None:
    worker = worker_of(model, "solve")
    played = await begin_episode(worker)
    (key,) = worker._gateway._handlers

    async def status() -> int:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{worker._gateway.url}/models") as reply,
        ):
            return reply.status

    assert await status() == 200
    await continue_episode(worker, played, lambda turn: "7")
    assert played.ended is not None and played.ended.reward == 1.0
    assert await status() == 401


async def test_agent_fault_hides_the_key_when_the_program_returns_it(model: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"returned '\(key\)'; it must be a number"):
        await play(worker_of(model, "returns_its_key"), str)


async def test_agent_calls_bypass_the_http_proxy_of_the_environment(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "example.org")
    played = await play(worker_of(model, "solve"), lambda turn: "7")
    assert played.ended is not None and played.ended.reward == 1.0


async def test_agent_fault_is_raised_when_a_restored_program_makes_no_call(model: str) -> None:
    first, second = worker_of(model, "solve"), worker_of(model, "calls_nobody")
    opened = await first.begin("a.5.0", PAYLOAD)
    await first.forget("a.5.0")
    await second.restore("b.5.1", PAYLOAD, [Turn(0, None, 0, opened.messages)])
    with pytest.raises(
        EnvironmentFault, match=r"without a call to the policy whose response it received$"
    ):
        await second.step("b.5.1", [3, 4], 0, 1 << 30, False, [-0.5, -0.5])
    await second.forget("b.5.1")


@pytest.mark.parametrize("dies", [False, True])
async def test_agent_reply_has_the_requested_form_when_the_worker_was_replaced(
    model: str, dies: bool
) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    worker = worker_with_tools(model, "asks_for_text")
    played = await begin_episode(worker)
    await continue_episode(worker, played, lambda turn: "hm", turns=1)
    if dies:
        worker = worker_with_tools(model, "asks_for_text")
        await worker.restore("a.5.0", PAYLOAD, played.turns)
    await continue_episode(worker, played, lambda turn: call)
    assert played.ended is not None and played.ended.reward == len(call)


async def test_agent_restore_is_a_fault_when_the_tool_parser_is_no_longer_set(model: str) -> None:
    """The run was resumed with `episode.tool_parser` removed from its settings."""
    tools = {"role": "tools", "content": json.dumps([{"function": {"name": "add"}}])}
    answer = {"text": "yes", "truncated": False, "tool_calls": [], "tokens": [5, 3]}
    turns = [
        Turn(0, None, 0, (tools, *HELLO["messages"]), end=FinishReason.STOP, answer=answer),
        Turn(1, 0, 1, HELLO["messages"], state=b"{}"),
    ]
    worker = worker_of(model, "solve")
    with pytest.raises(EnvironmentFault, match=r"episode\.tool_parser is not set"):
        await worker.restore("a.5.0", PAYLOAD, turns)
    await worker.forget("a.5.0")

"""Agents that are played: real programs with the real SDK, and a policy that the test writes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from megatron_async.commands.gateway import ServedPolicy, instructions
from megatron_async.config import build_config
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.environments.agents import AgentWorker
from megatron_async.environments.check import check_environment
from megatron_async.environments.gateway import Gateway
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.worker import Opened, Stepped
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.rollout.respond import SharedEngines
from megatron_async.trajectory.types import FinishReason, PolicyVersion, Turn

PROGRAMS = str(Path(__file__).parent / "agent_programs.py")
PAYLOAD = {"question": "ask?", "answer": "7", "metadata": {"seed": 3}, "messages": []}
ROOM = 1 << 30
Policy = Callable[[int], str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_character_tokenizer(folder)
    return str(folder)


def worker_of(model: str, program: str, *, scored: bool = False, **settings: Any) -> AgentWorker:
    """`settings`: those of `agent` and of `episode`."""
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
    """An episode as the store would have it: the tokens of each turn, input and answer."""

    tokenizer: Any
    turns: list[Turn] = field(default_factory=list)
    tokens: list[tuple[list[int], list[int]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    ended: Stepped | None = None

    def opened(self, opened: Opened | Stepped, parent: int | None) -> None:
        assert opened.token_ids is not None
        number = len(self.turns)
        self.turns.append(Turn(number, parent, 0, opened.messages, state=opened.state))
        self.tokens.append((list(opened.token_ids), []))
        self.notices += opened.notices

    def answer(self, text: str, *, cut: bool = False) -> list[int]:
        """The tokens of an answer that the policy has written."""
        ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        ids += [] if cut else [self.tokenizer.eos_token_id]
        self.tokens[-1] = (self.tokens[-1][0], ids)
        self.turns[-1] = replace(self.turns[-1], end=FinishReason.STOP)
        return ids

    def stepped(self, stepped: Stepped) -> None:
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
        """All tokens of a branch up to a turn's answer."""
        parent = self.turns[turn].parent
        before = "" if parent is None else self.text(parent)
        return before + str(self.tokenizer.decode([*self.tokens[turn][0], *self.tokens[turn][1]]))


async def play(
    worker: AgentWorker,
    policy: Policy,
    *,
    room: int = ROOM,
    most: int = 100,
    key: str = "a.5.0",
    payload: Mapping[str, Any] = PAYLOAD,
) -> Played:
    played = Played(load_tokenizer_once(worker))
    played.opened(await worker.begin(key, payload), None)
    await go_on(worker, played, policy, room=room, most=most, key=key)
    return played


async def go_on(
    worker: AgentWorker,
    played: Played,
    policy: Policy,
    *,
    room: int = ROOM,
    most: int = 100,
    key: str = "a.5.0",
    turns: int = 1000,
) -> None:
    while played.ended is None and turns:
        turns -= 1
        turn = len(played.turns) - 1
        ids = played.answer(policy(turn))
        last, logprobs = turn + 1 >= most, [-0.5] * len(ids)
        played.stepped(await worker.step(key, ids, turn, room, last, logprobs))


def load_tokenizer_once(worker: AgentWorker) -> Any:
    return worker._texts._conversation.args[1]


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 60))


def test_the_program_of_the_documents_plays_turns_of_one_branch(model: str) -> None:
    async def body() -> None:
        played = await play(worker_of(model, "solve"), lambda turn: "77"[: 2 - turn])
        assert played.ended is not None
        assert (played.ended.ended, played.ended.reward) == ("stop", 1.0)
        assert [turn.parent for turn in played.turns] == [None, 0]
        assert played.text(1) == "ask?\n77<eos>\nNo. Try again.\n7<eos>"
        assert [turn.answer and turn.answer["text"] for turn in played.turns] == ["77", "7"]
        assert played.turns[1].messages == ({"role": "user", "content": "No. Try again."},)
        assert played.counts == {"turns_left": 0}
        assert played.notices == []

    run(body())


def test_a_function_that_blocks_and_a_command_are_programs_too(model: str) -> None:
    async def body() -> None:
        played = await play(worker_of(model, "solve_in_a_thread"), lambda turn: "x")
        assert played.ended is not None
        assert (played.ended.reward, played.ended.answer["parts"]) == (0.5, {"turns": 2.0})
        command = worker_of(model, "", command=[sys.executable, PROGRAMS])
        played = await play(command, lambda turn: "x")
        assert played.ended is not None
        assert (played.ended.reward, played.ended.answer["parts"]) == (0.25, {"asked": 2.0})
        assert [turn.parent for turn in played.turns] == [None, None]
        assert played.counts["forks_repeated"] == 1

    run(body())


def test_streams_and_log_probs_are_the_stored_ones(model: str) -> None:
    async def body() -> None:
        worker = worker_of(model, "streams", scored=True)
        played = await play(worker, lambda turn: "a long answer of many pieces, each of a few")
        assert played.ended is not None
        assert (played.ended.ended, played.ended.reward) == ("stop", 0.0)
        answer = played.turns[1].answer
        assert answer is not None and len(answer["logprobs"]) == len(played.tokens[1][1])

    run(body())


def test_parallel_calls_run_one_after_the_other(model: str) -> None:
    async def body() -> None:
        played = await play(worker_of(model, "parallel"), str)
        assert played.ended is not None and played.ended.reward == 6.0
        assert {turn.parent for turn in played.turns} == {None}
        assert played.counts["forks_repeated"] == 3
        assert len(played.turns) == 6

    run(body())


def test_retries_of_the_sdk_are_the_same_call(model: str) -> None:
    async def body() -> None:
        worker = worker_of(model, "impatient")
        played = Played(load_tokenizer_once(worker))
        played.opened(await worker.begin("a.5.0", PAYLOAD), None)
        await asyncio.sleep(0.5)  # the client has given up, and asks again
        await go_on(worker, played, str)
        assert played.ended is not None and played.ended.reward == 1.0
        assert [turn.parent for turn in played.turns] == [None, 0]
        assert played.counts["turns_left"] == 0

    run(body())


def test_a_stream_that_is_broken_off_is_a_turn_and_what_follows_a_fork(model: str) -> None:
    async def body() -> None:
        played = await play(worker_of(model, "breaks_off"), lambda turn: "many words " * 40)
        assert played.ended is not None
        assert [turn.parent for turn in played.turns] == [None, None]
        assert played.counts["forks_answer"] == 1
        assert played.text(1).startswith("ask?\nm<eos>\non\n")
        assert played.ended.left == ()

    run(body())


QWEN = "{tool_call}\n{{}}\n{end}".format(tool_call="<tool_call>", end="</tool_call>")


def test_calls_of_tools_reach_the_program_and_their_results_the_policy(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.environments.templates import template_of

    call = json.dumps({"name": "add", "arguments": {"a": 41}})

    async def body() -> None:
        worker = worker_of(model, "uses_tools", tool_parser="qwen25")
        load_tokenizer_once(worker).chat_template = template_of("qwen2_5")
        worker._texts._known.clear()
        texts = [f"let me see <tool_call>\n{call}\n</tool_call>", "<tool_call>{</tool_call>"]
        played = await play(worker, lambda turn: texts[turn])
        assert played.ended is not None and played.ended.reward == 1.0
        assert [turn.parent for turn in played.turns] == [None, 0], "what it wrote came back"
        first, second = (turn.answer for turn in played.turns)
        assert first is not None and first["tool_calls"] == [
            {"name": "add", "arguments": {"a": 41}}
        ]
        assert second is not None and second["tool_calls"] == []
        assert second["text"] == texts[1], "no character of what cannot be read vanishes"
        assert '"name": "add"' in played.text(0)
        assert "<tool_response>\n42\n</tool_response>" in played.text(1)

    run(body())


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("dies", [False, True])
def test_program_gets_one_call_of_a_tool_when_it_takes_no_parallel_ones(
    model: str, parallel: bool, dies: bool
) -> None:
    from tests.environments.templates import template_of

    calls = "".join(
        f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': a}})}\n</tool_call>"
        for a in (41, 6)
    )

    def started() -> AgentWorker:
        arguments = {"parallel": parallel}
        worker = worker_of(model, "uses_tools", tool_parser="qwen25", arguments=arguments)
        load_tokenizer_once(worker).chat_template = template_of("qwen2_5")
        worker._texts._known.clear()
        return worker

    async def body() -> None:
        worker = started()
        played = Played(load_tokenizer_once(worker))
        played.opened(await worker.begin("a.5.0", PAYLOAD), None)
        if dies:  # the answer to a stored turn is read as its call asked
            worker = started()
            await worker.restore("a.5.0", PAYLOAD, played.turns)
        await go_on(worker, played, lambda turn: ("now " + calls, "done")[turn])
        assert played.ended is not None and played.ended.reward == (2.0 if parallel else 1.0)
        assert [turn.parent for turn in played.turns] == [None, 0], "what it got came back"
        assert played.turns[0].answer is not None
        assert played.turns[0].answer["text"] == "now " + calls
        assert len(played.turns[0].answer["tool_calls"]) == (2 if parallel else 1)
        assert f"now {calls}" in played.text(1), "the policy's own tokens are kept"
        assert ("<tool_response>\n7" in played.text(1)) == parallel

    run(body())


def test_tools_without_a_parser_are_refused_to_the_program(model: str) -> None:
    async def body() -> None:
        with pytest.raises(EnvironmentFault, match=r"400.*episode.tool_parser is not set"):
            await worker_of(model, "uses_tools").begin("a.5.0", PAYLOAD)

    run(body())


@pytest.mark.parametrize("limit", ["turns", "context"])
def test_a_full_episode_refuses_further_calls_and_ends_as_length(model: str, limit: str) -> None:
    async def body() -> None:
        worker = worker_of(model, "talks_on", arguments={"calls": 9}, max_turns=3)
        given = {"most": 3} if limit == "turns" else {"room": 3}
        played = await play(worker, str, **given)
        assert played.ended is not None
        assert (played.ended.ended, played.ended.reward) == ("length", 0.0)
        assert len(played.turns) == (3 if limit == "turns" else 1)

    run(body())


def test_a_program_that_forks_at_every_call_is_named_with_the_first_difference(model: str) -> None:
    async def body() -> None:
        played = await play(worker_of(model, "rewrites"), lambda turn: f"abc{turn}")
        assert played.counts["forks_answer"] == 3
        (notice,) = played.notices
        assert re.search(r"each of the 4 calls .* message 1: .*ABC0.* was .*abc0", notice)

    run(body())


FAULTS = {
    "calls_nobody": "ended without a call of the policy",
    "raises": r"raises' raised ValueError: no good with \(key\) at .*agent_programs.py:\d+",
    "asks_for_two": r"raised BadRequestError: .*n is 2.* at .*agent_programs.py:\d+$",
    "wants_more": "does not fit a row of .*prompt.*: missing a required argument: 'level'",
    "quits": r"raised SystemExit: 3 at .*agent_programs.py:\d+$",
    "quits_in_a_thread": r"raised SystemExit: 3 at .*agent_programs.py:\d+$",
    "runs_dry": r"raised RuntimeError: coroutine raised StopIteration at .*agent_programs.py$",
    "runs_dry_in_a_thread": r"raised StopIteration:  at .*agent_programs.py:\d+$",
    "runs_dry_in_a_promise": r"raised RuntimeError: coroutine raised StopIteration",
    "cancels_itself": "has cancelled itself",
    "sleeps": r"made no call and did not end for 0.2 s \(episode.step_seconds\)",
}


@pytest.mark.parametrize("program", FAULTS)
def test_what_is_wrong_with_a_program_is_one_sentence(model: str, program: str) -> None:
    async def body() -> None:
        worker = worker_of(model, program, step_seconds=0.2 if program == "sleeps" else 30.0)
        with pytest.raises(EnvironmentFault, match=FAULTS[program]):
            await worker.begin("a.5.0", PAYLOAD)
        await worker.forget("a.5.0")

    run(body())


def test_a_command_that_cannot_be_started_is_answered_with_what_can(
    model: str, tmp_path: Path
) -> None:
    (tmp_path / "play.sh").write_text("#!/bin/sh\n")

    async def body(command: str) -> None:
        with pytest.raises(EnvironmentFault, match=r"cannot be started: .*PATH.*chmod"):
            await worker_of(model, "", command=[command]).begin("a.5.0", PAYLOAD)

    run(body(str(tmp_path / "play.sh")))
    run(body("a-program-that-is-not-there"))


def test_nothing_returned_needs_a_reward(model: str) -> None:
    async def body() -> None:
        with pytest.raises(EnvironmentFault, match="returned None, and there is no `reward`"):
            await play(worker_of(model, "returns_nothing"), str)
        played = await play(worker_of(model, "returns_nothing", scored=True), str)
        assert played.ended is not None and played.ended.reward == 0.0

    run(body())


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import sys; sys.exit('no luck')", "ended with exit code 1: no luck"),
        ("import sys; sys.exit(400 * 'x' + '\\nlast line')", r"exit code 1: last line$"),
        ("import sys; sys.exit(400 * 'x ' + '.\\nab\\nc')", r"exit code 1: ab\s+c$"),
        (
            "import sys; sys.exit('RangeError: Out of memory\\nat a frame')",
            r"at a frame; episode\.memory_mib limits its address space to 4096 MiB more than",
        ),
        ("print('a lot')", "printed 'a lot' at last; that must be its reward"),
        ("pass", "printed nothing, or null, and there is no `reward`.*: give a number or set"),
        ("import os; print(os.environ['OPENAI_API_KEY'])", r"printed '\(key\)' at last"),
        ("import os, sys; sys.exit(os.environ['OPENAI_API_KEY'] + 280 * 'x')", r": \(key\)x{280}$"),
        ("import os; raise ValueError(os.environ['OPENAI_API_KEY'])", r"ValueError: \(key\)$"),
    ],
)
def test_a_command_that_fails_is_one_sentence(model: str, code: str, sentence: str) -> None:
    async def body() -> None:
        worker = worker_of(model, "", command=[sys.executable, "-c", code])
        with pytest.raises(EnvironmentFault, match=sentence):
            await worker.begin("a.5.0", PAYLOAD)

    run(body())


LEAVES = """
import subprocess, sys
left = subprocess.Popen(["sleep", "300"], start_new_session=True)
open(sys.argv[1], "w").write(str(left.pid))
"""


def test_a_command_ends_when_what_it_has_left_behind_does_not(model: str, tmp_path: Path) -> None:
    file = tmp_path / "left"

    async def body() -> None:
        worker = worker_of(model, "", command=[sys.executable, "-S", "-c", LEAVES, str(file)])
        try:
            with pytest.raises(
                EnvironmentFault, match="printed nothing, or null, and there is no `reward`"
            ):
                await asyncio.wait_for(worker.begin("a.5.0", PAYLOAD), 50)
        finally:
            os.kill(int(file.read_text()), signal.SIGKILL)  # it holds the outputs open
            await asyncio.sleep(0.5)

    run(body())


def test_a_command_that_is_forgotten_leaves_nothing_in_the_log(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        worker = worker_of(model, "", command=[sys.executable, PROGRAMS])
        await worker.begin("a.5.0", PAYLOAD)
        await worker.forget("a.5.0")
        gc.collect()  # which names exceptions that nobody has asked for

    run(body())
    assert "environments/programs.py" not in caplog.text


def test_functions_that_cannot_be_called_are_refused_at_once(model: str) -> None:
    with pytest.raises(UserError, match=r"takes no argument 'base_url'"):
        worker_of(model, "user")
    with pytest.raises(UserError, match=r"agent\.arguments has 'calls', which .* does not take"):
        worker_of(model, "solve_in_a_thread", arguments={"calls": 3})


# ---------------------------------------------------------------- restored


def restored(played: Played, tokens: int) -> Sequence[Turn]:
    """The turns as the store has them when the newest answer is there and its reply is not."""
    state = json.dumps({"tokens": tokens}).encode()
    return (*played.turns[:-1], replace(played.turns[-1], state=state))


def test_a_program_that_runs_again_gets_the_stored_answers(model: str, tmp_path: Path) -> None:
    log = tmp_path / "answers"

    async def body() -> None:
        settings: dict[str, Any] = {"arguments": {"log": str(log), "calls": 4}}
        first = worker_of(model, "talks_on", **settings)
        played = Played(load_tokenizer_once(first))
        played.opened(await first.begin("a.5.0", PAYLOAD), None)
        await go_on(first, played, lambda turn: f"first {turn}", turns=2)
        assert len(played.turns) == 3
        second = worker_of(model, "talks_on", **settings)
        taken = sum(len(ids) for pair in played.tokens for ids in pair)
        await second.restore("b.5.1", PAYLOAD, restored(played, taken))
        await go_on(second, played, lambda turn: f"second {turn}", key="b.5.1")
        assert played.ended is not None and played.ended.reward == 1.0
        assert [turn.parent for turn in played.turns] == [None, 0, 1, 2]
        assert played.counts["turns_replayed"] == 2
        assert played.ended.left == ()
        texts = [turn.answer["text"] for turn in played.turns if turn.answer]
        assert texts == ["first 0", "first 1", "second 2", "second 3"]
        tokens = played.turns[3].answer and played.turns[3].answer["tokens"]
        assert tokens == [sum(len(i) for p in played.tokens for i in p) - 9, 9]
        await first.forget("a.5.0")

    run(body())
    seen: dict[int, set[str]] = {}
    for line in log.read_text().splitlines():
        _, place, text = json.loads(line)
        seen.setdefault(place, set()).add(text)
    assert all(len(texts) == 1 for texts in seen.values()), "each call was answered in one way"


def test_turns_that_the_second_program_does_not_ask_for_are_left(model: str) -> None:
    async def body() -> None:
        first, second = worker_of(model, "drifts"), worker_of(model, "drifts")
        played = Played(load_tokenizer_once(first))
        played.opened(await first.begin("a.5.0", PAYLOAD), None)
        await go_on(first, played, str, turns=1)
        await second.restore("b.5.1", PAYLOAD, restored(played, 20))
        await go_on(second, played, str, key="b.5.1")
        assert played.ended is not None
        assert played.ended.left == (1,), "of the first program's second call"
        assert [turn.parent for turn in played.turns] == [None, 0, 0, 0]
        assert played.counts["turns_replayed"] == 1
        assert played.counts["turns_left"] == 1
        await first.forget("a.5.0")

    run(body())


def test_preflight_plays_an_episode_with_made_up_answers(model: str) -> None:
    async def body() -> None:
        found = await worker_of(model, "solve").rehearse(PAYLOAD)
        assert (found.opening, found.text) == (5, "ask?\n")
        assert found.observation == len("\nNo. Try again.\n")
        with pytest.raises(EnvironmentFault, match="no good with"):
            await worker_of(model, "raises").rehearse(PAYLOAD)

    run(body())


def test_a_function_that_blocks_needs_a_thread_for_each_open_episode(model: str) -> None:
    agent = {"name": f"{PROGRAMS}:solve_in_a_thread"}
    schedule = {"groups_per_batch": 2, "group_size": 2, "concurrency": 4}
    episode = {"threads": 3}
    config = build_config(
        {"model": {"path": model}, "agent": agent, "episode": episode, "schedule": schedule}
    )
    sentence = "episode.workers x episode.threads is 3, and 4 episodes or more are open"
    with pytest.raises(UserError, match=sentence):
        check_environment(config, PAYLOAD, None)


def test_the_check_before_a_start_names_the_program_once(model: str) -> None:
    agent = {"name": f"{PROGRAMS}:calls_nobody"}
    config = build_config({"model": {"path": model}, "agent": agent})
    with pytest.raises(UserError, match=r"^agent\.name '[^']*' ended without a call"):
        check_environment(config, PAYLOAD, None)


def test_the_gateway_command_serves_a_policy_without_training(model: str) -> None:
    config = build_config({"model": {"path": model}, "sampling": {"max_new_tokens": 8}})
    simulated = SimulatedEngineModel(mean_length=100, step_seconds=0.0, longest_tokens=100)
    engine = SimulatedEngine("engine", simulated)
    engine.set_weights(PolicyVersion(0, 0))

    async def body() -> None:
        gateway = Gateway(config.sampling)
        bound = socket.create_server(("127.0.0.1", 0))
        url = await gateway.start(bound)
        assert url == f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        key = gateway.open(ServedPolicy(config, model, SharedEngines(lambda: [engine])))
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
        with pytest.raises(BadRequestError, match="refuses a prompt of 2") as refused:
            await ask(model="policy", messages=[{"role": "user", "content": "x" * 200}])
        assert refused.value.code == "context_length_exceeded", "as in a run"
        await gateway.close()

    run(body())

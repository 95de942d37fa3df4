"""Agents in a run: what engines are asked and send, and what is stored and trained of it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.rollout.manager import ResumePoint
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import Trajectory
from tests.environments.inside import InsidePlace
from tests.rollout.test_episodes import Run, configured, episodes_of, run, tokenizer

__all__ = ["tokenizer"]

PROGRAMS = str(Path(__file__).parents[1] / "environments" / "agent_programs.py")


def with_agent(
    folder: Path, rows: Path, program: str, preset: str = "copris", **changes: Any
) -> RunConfig:
    """A run whose agent is one of the programs, over prompts `ask 0 `, `ask 1 `, and so on."""
    problems = [{"prompt": f"ask {n} ", "answer": f"{n}"} for n in range(200)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in problems))
    agent = {"name": f"{PROGRAMS}:{program}", **changes.pop("agent", {})}
    task = {"kind": "files", "path": str(rows)}
    return configured(folder, preset, environment={"name": ""}, agent=agent, task=task, **changes)


def assert_engines_and_store_agree(one: Run, episodes: dict[int, Trajectory]) -> None:
    """Every request is a branch of its episode; what was sent for it is what is stored."""
    for engine in one.engines:
        for request in engine.requests:
            episode = episodes[int(request.request_id[1:].partition("-")[0])]
            if episode.state == "dropped":
                continue
            asked = request.input_ids.tolist()
            sent = [int(t) for c in engine.chunks.get(request.request_id, []) for t in c.token_ids]
            paths = [stored_path(episode, turn.number) for turn in episode.turns]
            assert any(
                path[: len(asked)] == asked
                and path[len(asked) :][: len(sent)] == sent[: len(path) - len(asked)]
                for path in paths
            )


def stored_path(episode: Trajectory, number: int) -> list[int]:
    path = episode.path(episode.turns[number])
    tokens = [s.token_ids.tolist() for turn in path for s in episode.segments_of(turn)]
    return [*episode.prompt.token_ids.tolist(), *(t for part in tokens for t in part)]


def assert_batches_hold_each_answer_once(
    batches: list[TokenBatch], episodes: dict[int, Trajectory]
) -> None:
    trained: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for batch in batches:
        for number, start, end in zip(
            batch.trajectory_ids_S, batch.cu_seqlens_S1, batch.cu_seqlens_S1[1:], strict=False
        ):
            mask_T = batch.loss_mask_T[start:end] > 0
            ids_T = batch.token_ids_T[start:end][mask_T].tolist()
            logprobs_T = batch.rollout_logprobs_T[start:end][mask_T].tolist()
            trained[int(number)] += zip(ids_T, logprobs_T, strict=True)
    for number, tokens in trained.items():
        episode = episodes[number]
        written = [
            pair
            for turn in episode.turns
            if not turn.left
            for s in episode.segments_of(turn)
            if not s.from_environment
            for pair in zip(s.token_ids.tolist(), s.logprobs.tolist(), strict=True)
        ]
        assert sorted(tokens) == sorted(written)


@pytest.mark.parametrize("preset", ["sync", "copris", "pipeline", "async"])
@pytest.mark.parametrize("program", ["talks_on", "parallel"])
def test_what_is_asked_stored_and_trained_are_the_same_tokens(
    tmp_path: Path, tokenizer: Path, preset: str, program: str
) -> None:
    one = Run(tmp_path, with_agent(tokenizer, tmp_path / "rows.jsonl", program, preset))
    batches: list[TokenBatch] = []

    async def body() -> None:
        await one.begin(ResumePoint(0))
        batches.extend(await one.train(range(3)))
        warned = one.manager._driver.statistics.warnings.keys()
        assert not warned & {"agent", "environment_failed", "superseded_append"}
        await one.manager.stop()

    run(body())
    episodes = episodes_of(one)
    assert_engines_and_store_agree(one, episodes)
    assert_batches_hold_each_answer_once(batches, episodes)
    ended = [e for e in episodes.values() if e.state == "batched"]
    asked = {"talks_on": 4, "parallel": 6}[program]
    assert {len(e.turns) for e in ended} == {asked}
    assert {len(e.branches()) for e in ended} == {1 if program == "talks_on" else asked}
    assert {e.reward for e in ended} == {1.0 if program == "talks_on" else 6.0}
    if program == "parallel":
        assert batches[-1].extra_metrics["rollout/forks_repeated"] > 0
        assert batches[-1].extra_metrics["rollout/forks"] > 0
    else:
        assert "rollout/forks" not in batches[-1].extra_metrics


def call_and_whole(episode: Trajectory, number: int) -> tuple[list[Any], list[Any]]:
    """The messages of the call that a turn was, and those with its answer."""
    turn = episode.turns[number]
    before = [] if turn.parent is None else call_and_whole(episode, turn.parent)[1]
    call = [*before, *map(dict, turn.messages)]
    answer = "" if turn.answer is None else turn.answer["text"]
    return call, [*call, {"role": "assistant", "content": answer}]


def forks_of(episode: Trajectory) -> int:
    """Check that each turn continues the longest branch that its call begins with; count forks."""
    parents: list[int | None] = []
    for turn in episode.turns:
        call, _ = call_and_whole(episode, turn.number)
        wholes = [call_and_whole(episode, earlier)[1] for earlier in range(turn.number)]
        lengths = [len(w) if call[: len(w)] == w else 0 for w in wholes]
        longest = max(lengths, default=0)
        if longest:
            assert turn.parent is not None and lengths[turn.parent] == longest
        else:
            assert turn.parent is None
        parents.append(turn.parent)
    return sum(parent is None or parent in parents[:n] for n, parent in enumerate(parents) if n)


@pytest.mark.parametrize(
    ("steps", "deaths"),
    [(3, 0), pytest.param(2, 61), pytest.param(170, 0, marks=pytest.mark.slow)],
)
def test_random_conversations_are_stored_as_they_were_asked_and_fork_as_they_must(
    tmp_path: Path, tokenizer: Path, steps: int, deaths: int
) -> None:
    log = tmp_path / "calls"
    agent = {"arguments": {"log": str(log)}}
    place = InsidePlace(before=deaths)
    rows = tmp_path / "rows.jsonl"
    one = Run(tmp_path, with_agent(tokenizer, rows, "wanders", agent=agent), place=place)
    batches: list[TokenBatch] = []

    async def body() -> None:
        await one.begin(ResumePoint(0))
        batches.extend(await one.train(range(steps)))
        counts = one.manager._driver.statistics.counts.episodes
        assert counts["environment_failures"] == 0, one.manager._driver.statistics.warnings
        await one.manager.stop()

    run(body())
    episodes = episodes_of(one)
    assert_engines_and_store_agree(one, episodes)
    assert_batches_hold_each_answer_once(batches, episodes)
    asked: defaultdict[str, list[Any]] = defaultdict(list)
    for line in log.read_text().splitlines():
        prompt, messages = json.loads(line)
        asked[prompt].append(messages)
    ended = [e for e in episodes.values() if e.state == "batched"]
    assert len(ended) == 6 * steps
    assert sum(map(forks_of, ended)) > len(ended)
    for episode in ended:
        for turn in episode.turns:
            call, _ = call_and_whole(episode, turn.number)
            assert call in asked[episode.prompt.payload["question"]]


@pytest.mark.parametrize("program", ["talks_on", "drifts"])
def test_a_worker_that_dies_costs_no_episode(tmp_path: Path, tokenizer: Path, program: str) -> None:
    log = tmp_path / "answers"
    agent = {"arguments": {"log": str(log)}}
    config = with_agent(tokenizer, tmp_path / "rows.jsonl", program, agent=agent)
    one = Run(tmp_path, config, place=InsidePlace(before=53, after=71))
    batches: list[TokenBatch] = []

    async def body() -> None:
        await one.begin(ResumePoint(0))
        batches.extend(await one.train(range(8)))
        counts = one.manager._driver.statistics.counts.episodes
        assert counts["restored"] > 0
        assert counts["workers_lost"] > 0
        assert counts["turns_replayed"] > 0
        assert (counts["turns_left"] > 0) == (program == "drifts")
        assert counts["environment_failures"] == 0, one.manager._driver.statistics.warnings
        await one.manager.stop()

    run(body())
    episodes = episodes_of(one)
    assert_engines_and_store_agree(one, episodes)
    assert_batches_hold_each_answer_once(batches, episodes)
    if program == "talks_on":
        assert_log_agrees(log, episodes)


def assert_log_agrees(log: Path, episodes: dict[int, Trajectory]) -> None:
    """Every answer that a program has logged is stored, of an episode with its prompt."""
    stored = {
        (e.prompt.payload["question"], 2 * turn.number + 1, turn.answer["text"])
        for e in episodes.values()
        for turn in e.turns
        if turn.answer is not None
    }
    unfinished = {
        e.prompt.payload["question"] for e in episodes.values() if e.state not in ("batched",)
    }
    for line in log.read_text().splitlines():
        prompt, place, text = json.loads(line)
        assert (prompt, place, text) in stored or prompt in unfinished


def open_with_turns(one: Run) -> dict[int, Trajectory]:
    """Episodes of the store that wait or are in a turn after their first."""
    return {
        number: episode
        for number, episode in episodes_of(one).items()
        if episode.state in ("waiting", "partial") and episode.turns
    }


def test_open_episodes_go_on_after_the_manager_has_died(tmp_path: Path, tokenizer: Path) -> None:
    config = with_agent(tokenizer, tmp_path / "rows.jsonl", "talks_on")
    open_ids: dict[int, list[int]] = {}

    async def first() -> None:
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(0))
        await one.train(range(2))
        async with asyncio.timeout(60):
            while not open_with_turns(one):
                await asyncio.sleep(0.01)
        await one.manager.stop()
        for number, episode in open_with_turns(one).items():
            open_ids[number] = stored_path(episode, len(episode.turns) - 1)

    async def second() -> None:
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(1, 2, parent=0))
        await one.train(range(2, 6))
        counts = one.manager._driver.statistics.counts.episodes
        assert counts["restored"] > 0
        assert counts["environment_failures"] == 0, one.manager._driver.statistics.warnings
        await one.manager.stop()
        after = episodes_of(one)
        for number, path in open_ids.items():
            if after[number].state == "batched":
                last = len(after[number].turns) - 1
                assert stored_path(after[number], last)[: len(path)] == path

    run(first())
    assert open_ids
    run(second())


ENDS_AT_ONCE_FROM_NOW_ON = """
import json, os, sys
from urllib.request import Request, urlopen
if os.path.exists(sys.argv[1]):
    sys.exit(3)
prompt = json.loads(sys.stdin.readline())["prompt"]
body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))
print(1)
"""


def test_an_agent_that_only_fails_ends_the_run_with_a_sentence_and_nothing_is_lost(
    tmp_path: Path, tokenizer: Path
) -> None:
    fails = tmp_path / "fails"
    command = [sys.executable, "-S", "-c", ENDS_AT_ONCE_FROM_NOW_ON, str(fails)]
    agent = {"name": "", "command": command}
    config = with_agent(tokenizer, tmp_path / "rows.jsonl", "", agent=agent)
    kept: dict[int, list[int]] = {}

    async def first() -> None:
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(0))
        await one.train(range(1))
        fails.touch()
        sentence = (
            r"64 calls of agent.command \[.*\] failed in a row and none succeeded; the last: "
            r"agent.command \[.*\] ended with exit code 3"
        )
        with pytest.raises(ComponentFailure, match=sentence):
            await one.train(range(1, 1000))
        await one.manager.stop()
        for number, episode in episodes_of(one).items():
            if episode.state in ("batched", "scored", "finished"):
                kept[number] = stored_path(episode, len(episode.turns) - 1)

    async def second() -> None:
        fails.unlink()
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(1, 1, parent=0))
        await one.train(range(1, 3))
        await one.manager.stop()
        after = episodes_of(one)
        assert {n: stored_path(after[n], len(after[n].turns) - 1) for n in kept} == kept
        assert not {after[n].drop_reason for n in kept} - {None}

    run(first())
    assert len(kept) >= 6, "those of the first batch"
    run(second())


def test_a_first_call_that_no_engine_takes_is_refused_to_the_program(
    tmp_path: Path, tokenizer: Path
) -> None:
    one = Run(tmp_path, with_agent(tokenizer, tmp_path / "rows.jsonl", "shortens"))

    async def body() -> None:
        await one.begin(ResumePoint(0))
        await one.train(range(1))
        warned = one.manager._driver.statistics.warnings.keys()
        assert not warned & {"environment_failed"}
        await one.manager.stop()

    run(body())
    ended = [e for e in episodes_of(one).values() if e.state == "batched"]
    assert {(e.reward, len(e.turns), e.finish_reason) for e in ended} == {(200.0, 1, "length")}


def test_other_sampling_is_one_warning(tmp_path: Path, tokenizer: Path) -> None:
    one = Run(tmp_path, with_agent(tokenizer, tmp_path / "rows.jsonl", "cool"))

    async def body() -> None:
        await one.begin(ResumePoint(0))
        await one.train(range(1))
        assert one.manager._driver.statistics.warnings["agent"] == (
            "an agent asks for another temperature; the run's sampling.temperature 1 is used"
        )
        await one.manager.stop()

    run(body())


def test_an_agent_does_not_go_with_what_has_one_response(tmp_path: Path, tokenizer: Path) -> None:
    def refused(sentence: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=re.escape(sentence)):
            with_agent(tokenizer, tmp_path / "rows.jsonl", "solve", **changes)

    refused("has one weight for a whole response", algorithm={"recipe": "rapid"})
    refused("algorithm.overlong shapes", algorithm={"overlong": {"buffer_share": 0.5}})
    refused("set one of them", agent={"command": ["true"]})
    refused("agent.name is 'solve'; it must be", agent={"name": "solve"})
    with pytest.raises(UserError, match=r"episode.max_turns is set and environment.name"):
        configured(tokenizer, environment={"name": ""}, episode={"max_turns": 3})
    with pytest.raises(UserError, match="are both set"):
        configured(tokenizer, agent="agent.py:solve")

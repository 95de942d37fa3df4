"""Tests hundreds of conversations with the chat templates of several families: what is requested,
stored and trained.

Environments send several messages, none, or long ones. Agents edit and forget messages and make
equal and concurrent calls, so that episodes fork. Both have tools if the template can show them.
Requests break off, or are aborted and resumed with newer weights, and environments are restored in
the middle of an episode. What engines were sent and have sent is recorded separately from the
store.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from megatron_async.config import RunConfig
from megatron_async.engines.interface import EngineError, GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.rollout.manager import ResumePoint
from megatron_async.tasks.text_task import load_tokenizer, stop_tokens
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import Trajectory
from tests.environments.inside import InProcessBackend
from tests.environments.templates import family_tokenizer
from tests.rollout.episode_runs import (
    LOOPS,
    SECONDS,
    RecordingEngine,
    Run,
    assert_answers_end,
    assert_requests_are_prefixes,
    assert_trained_once,
    configured,
    episodes_of,
    own_tokens,
    tokens_that_arrived,
    with_agent,
)

__all__ = ["LOOPS", "SECONDS"]

BREAKS_AT = 41
GROUPS, FORKED_GROUPS, MEMBERS, BATCHES = 25, 2, 4, 5
ROLES = {"qwen3": ("user", "tool")}
CALLS = {
    "qwen3": ("qwen25", '<tool_call>\n{"name": "%s", "arguments": {"a": %s}}\n</tool_call>'),
    "llama3_1": ("llama3", '<|python_tag|>{"name": "%s", "parameters": {"a": %s}}'),
}
"""For each family whose template shows tools: a parser, and the text of a tool call with its
argument."""


class Breaking(RecordingEngine):
    """Simulated engine on which every `BREAKS_AT`-th request breaks off after its first tokens."""

    numbers = itertools.count(1)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        breaks = next(self.numbers) % BREAKS_AT == 0
        async for chunk in super().generate(request):
            yield chunk
            if breaks and chunk.end is None:
                raise EngineError("the connection broke off")


def family_folder(folder: Path, family: str, tool: str = "") -> Path:
    """Write the tokenizer of a model family to a folder and return the folder.

    Args:
        tool: Tool of which right and wrong calls make up much of the vocabulary; empty for none.
    """
    folder.mkdir()
    tokenizer, stops = family_tokenizer(family)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stops[0])
    if tool:
        form = CALLS[family][1]
        calls = [form % (tool, n) for n in range(25)]
        calls += [form % ("nothing", n) for n in range(3)]  # There is no tool of this name.
        calls += [form % (tool, f"{n}}}") for n in range(3)]  # The arguments are not valid JSON.
        tokenizer.add_tokens([AddedToken(call, normalized=False) for call in calls])
    tokenizer.save_pretrained(str(folder))
    return folder


async def played(folder: Path, config: RunConfig, batches: int) -> tuple[Run, list[TokenBatch]]:
    """Train `batches` batches on engines whose requests sometimes break off, with environment
    workers that die."""
    tokenizer = load_tokenizer(config.model.path)
    one = Run(folder, config, backend=InProcessBackend(before=211, after=307))
    engine_model = SimulatedEngineModel(
        vocab_size=len(tokenizer), mean_length=6, step_seconds=0.001, stream_interval=2
    )
    one.engines = [Breaking(f"engine{i}", engine_model) for i in range(2)]
    trained: list[TokenBatch] = []
    await one.begin(ResumePoint(0))
    trained.extend(await one.train(range(batches)))
    counts = one.manager._driver.statistics.counts.episodes
    assert counts["restored"] > 0
    assert counts["environment_failures"] == 0, one.manager._driver.statistics.warnings
    await one.manager.stop()
    return one, trained


def assert_every_token_is_kept(one: Run, batches: list[TokenBatch]) -> dict[int, Trajectory]:
    """Check what was requested, stored and trained against what engines sent; return the
    episodes."""
    config, episodes = one.config, episodes_of(one)
    members = config.schedule.groups_per_batch * config.schedule.group_size
    assert [len(set(batch.trajectory_ids_S.tolist())) for batch in batches] == [members] * BATCHES
    arrived = tokens_that_arrived(one)
    stops = stop_tokens(config.model.path, load_tokenizer(config.model.path))
    assert_requests_are_prefixes(one, episodes)
    for episode in episodes.values():
        for before, token in own_tokens(episode, include_abandoned=True):
            assert token in arrived[episode.trajectory_id][before]
        assert_answers_end(episode, stops, config.sampling.max_new_tokens)
    assert_trained_once(batches, episodes)
    resumed = [e for e in episodes.values() if len({s.version for s in e.segments}) > 2]
    assert resumed, "no response has tokens of two versions"
    return episodes


def changes_of(groups: int, concurrency: int = 32) -> dict[str, Any]:
    schedule = {"groups_per_batch": groups, "group_size": MEMBERS, "concurrency": concurrency}
    return {
        "schedule": schedule,
        "engines": {"max_total_tokens": 100_000},
    }


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
async def test_every_token_of_conversations_is_stored_and_trained(
    tmp_path: Path, family: str
) -> None:
    model = family_folder(tmp_path / "model", family)
    game = {"arguments": {"turns": 6, "roles": ROLES.get(family, ("user",))}}
    config = configured(model, game="Talkative", environment=game, **changes_of(GROUPS))
    episodes = assert_every_token_is_kept(*await played(tmp_path, config, BATCHES))
    assert all(len(e.branches()) <= 1 for e in episodes.values())


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("family", list(CALLS))
async def test_every_token_of_conversations_with_tool_calls_is_trained(
    tmp_path: Path, family: str
) -> None:
    model = family_folder(tmp_path / "model", family, "look")
    tools = {"tool_parser": CALLS[family][0], "max_turns": 6}
    config = configured(model, game="Tools", episode=tools, **changes_of(GROUPS))
    episodes = assert_every_token_is_kept(*await played(tmp_path, config, BATCHES))
    returned = Counter(
        message["content"].partition(":")[0][:8]
        for e in episodes.values()
        for turn in e.turns
        for message in turn.messages
        if message["role"] == "tool"
    )
    assert {"seen", "", "x y x y ", "Error"} <= returned.keys()


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("family", ["llama3", "gemma3", "llama3_1"])
async def test_every_token_of_forking_conversations_is_stored_and_trained(
    tmp_path: Path, family: str
) -> None:
    tools = family in CALLS
    model = family_folder(tmp_path / "model", family, "add" if tools else "")
    arguments = {"system": family != "gemma3", "tools": tools}
    changes: dict[str, Any] = {"agent": {"arguments": arguments}, **changes_of(FORKED_GROUPS, 12)}
    if tools:
        changes["episode"] = {"tool_parser": CALLS[family][0]}
    rows = tmp_path / "rows.jsonl"
    config = with_agent(model, rows, "wanders_over", **changes)
    episodes = assert_every_token_is_kept(*await played(tmp_path, config, BATCHES))
    ended = [e for e in episodes.values() if e.state == "batched"]
    assert sum(len(e.branches()) for e in ended) > 2 * len(ended)
    sent = [m for e in ended for turn in e.turns for m in turn.messages]
    assert ("tool" in {message["role"] for message in sent}) == tools
    assert {"", "x y " * 40} <= {message["content"] for message in sent}

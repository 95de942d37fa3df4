"""Three thousand conversations, from templates of four families: what is asked, stored, trained.

Environments send several messages, nothing, much; agents edit, forget, ask twice and at once, so
that episodes fork; both have tools, where the template can show them. Requests break off, are
aborted and resumed under newer weights; environments are restored in the middle. What engines sent,
and what they were sent, is written down beside the store.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from megatron_async.config import RunConfig
from megatron_async.engines.interface import EngineError, GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.rollout.manager import ResumePoint
from megatron_async.tasks.text_task import load_tokenizer, stop_tokens
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion, Trajectory, Turn
from tests.environments.inside import InsidePlace
from tests.environments.templates import family_tokenizer
from tests.rollout.test_agents import with_agent
from tests.rollout.test_episodes import Noting, Run, configured, episodes_of, run

BREAKS_AT = 41  # every so many requests one breaks off
GROUPS, FORKED_GROUPS, MEMBERS, BATCHES = 25, 2, 4, 5
ROLES = {"qwen3": ("user", "tool"), "llama3": ("user", "tool"), "smollm2": ("user", "tool")}
CALLS = {
    "qwen3": ("qwen25", '<tool_call>\n{"name": "%s", "arguments": {"a": %s}}\n</tool_call>'),
    "llama3_1": ("llama3", '<|python_tag|>{"name": "%s", "parameters": {"a": %s}}'),
}
"""Of families whose templates show tools: a parser, and a call of a tool with its argument."""
Token = tuple[int, float, PolicyVersion]
Before = int
"""All tokens before one, as a number."""


class Breaking(Noting):
    """An engine on which some requests break off behind their first tokens."""

    numbers = itertools.count(1)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        breaks = next(self.numbers) % BREAKS_AT == 0
        async for chunk in super().generate(request):
            yield chunk
            if breaks and chunk.end is None:
                raise EngineError("the connection broke off")


def family_folder(folder: Path, family: str, tool: str = "") -> Path:
    """A model's folder; `tool`: much of its vocabulary is calls of this, right and wrong ones."""
    folder.mkdir()
    tokenizer, stops = family_tokenizer(family)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stops[0])
    if tool:
        form = CALLS[family][1]
        calls = [form % (tool, n) for n in range(25)]
        calls += [form % ("nothing", n) for n in range(3)]  # no such tool
        calls += [form % (tool, f"{n}}}") for n in range(3)]  # no JSON
        tokenizer.add_tokens([AddedToken(call, normalized=False) for call in calls])
    tokenizer.save_pretrained(str(folder))
    return folder


def played(folder: Path, config: RunConfig, batches: int) -> tuple[Run, list[TokenBatch]]:
    """A run on engines of which some requests break off, and workers of environments that die."""
    tokenizer = load_tokenizer(config.model.path)
    one = Run(folder, config, place=InsidePlace(before=211, after=307))
    engine_model = SimulatedEngineModel(
        vocab_size=len(tokenizer), mean_length=6, step_seconds=0.001, stream_interval=2
    )
    one.engines = [Breaking(f"engine{i}", engine_model) for i in range(2)]
    trained: list[TokenBatch] = []

    async def body() -> None:
        await one.begin(ResumePoint(0))
        trained.extend(await one.train(range(batches)))
        counts = one.manager._driver.statistics.counts.episodes
        assert counts["restored"] > 0
        assert counts["environment_failures"] == 0, one.manager._driver.statistics.warnings
        await one.manager.stop()

    run(body())
    return one, trained


def assert_every_token_is_kept(one: Run, batches: list[TokenBatch]) -> dict[int, Trajectory]:
    """Check what was asked, stored and trained against what engines sent; return the episodes."""
    config, episodes = one.config, episodes_of(one)
    members = config.schedule.groups_per_batch * config.schedule.group_size
    assert [len(set(batch.trajectory_ids_S.tolist())) for batch in batches] == [members] * BATCHES
    arrived = tokens_that_arrived(one)
    stops = stop_tokens(config.model.path, load_tokenizer(config.model.path))
    assert_requests_are_prefixes(one, episodes)
    for episode in episodes.values():
        for before, token in own_tokens(episode, left=True):
            assert token in arrived[episode.trajectory_id][before]
        assert_answers_end(episode, stops, config.sampling.max_new_tokens)
    assert_trained_once(batches, episodes)
    resumed = [e for e in episodes.values() if len({s.version for s in e.segments}) > 2]
    assert resumed, "some answers are of two versions"
    return episodes


def changes_of(groups: int, concurrency: int = 32) -> dict[str, Any]:
    schedule = {"groups_per_batch": groups, "group_size": MEMBERS, "concurrency": concurrency}
    return {
        "schedule": schedule,
        "engines": {"max_total_tokens": 100_000},
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama3", "smollm2", "gemma3"])
def test_conversations_keep_every_token(tmp_path: Path, family: str) -> None:
    model = family_folder(tmp_path / "model", family)
    game = {"arguments": {"turns": 6, "roles": ROLES.get(family, ("user",))}}
    config = configured(model, game="Talkative", environment=game, **changes_of(GROUPS))
    episodes = assert_every_token_is_kept(*played(tmp_path, config, BATCHES))
    assert all(len(e.branches()) <= 1 for e in episodes.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", list(CALLS))
def test_conversations_with_calls_keep_every_token(tmp_path: Path, family: str) -> None:
    model = family_folder(tmp_path / "model", family, "look")
    tools = {"tool_parser": CALLS[family][0], "max_turns": 6}
    config = configured(model, game="Tools", episode=tools, **changes_of(GROUPS))
    episodes = assert_every_token_is_kept(*played(tmp_path, config, BATCHES))
    returned = Counter(
        message["content"].partition(":")[0][:8]
        for e in episodes.values()
        for turn in e.turns
        for message in turn.messages
        if message["role"] == "tool"
    )
    assert {"seen", "", "x y x y ", "Error"} <= returned.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama3", "smollm2", "gemma3", "llama3_1"])
def test_conversations_that_fork_keep_every_token(tmp_path: Path, family: str) -> None:
    tools = family in CALLS
    model = family_folder(tmp_path / "model", family, "add" if tools else "")
    arguments = {"system": family != "gemma3", "tools": tools}
    changes: dict[str, Any] = {"agent": {"arguments": arguments}, **changes_of(FORKED_GROUPS, 12)}
    if tools:
        changes["episode"] = {"tool_parser": CALLS[family][0]}
    rows = tmp_path / "rows.jsonl"
    config = with_agent(model, rows, "wanders_over", **changes)
    episodes = assert_every_token_is_kept(*played(tmp_path, config, BATCHES))
    ended = [e for e in episodes.values() if e.state == "batched"]
    assert sum(len(e.branches()) for e in ended) > 2 * len(ended)
    sent = [m for e in ended for turn in e.turns for m in turn.messages]
    assert ("tool" in {message["role"] for message in sent}) == tools
    assert {"", "x y " * 40} <= {message["content"] for message in sent}


def after(before: Before, token: int) -> Before:
    return hash((before, token))


def path_of(episode: Trajectory, turn: Turn) -> list[int]:
    """The tokens from the first turn of a branch to the end of one of its turns."""
    parts = [s.token_ids for t in episode.path(turn) for s in episode.segments_of(t)]
    return [int(token) for part in (episode.prompt.token_ids, *parts) for token in part]


def own_tokens(episode: Trajectory, *, left: bool) -> Iterator[tuple[Before, Token]]:
    """Each token of the policy, once, with what is before it in its branch.

    `left`: also those of answers that a program never got.
    """
    ends: dict[int | None, Before] = {None: 0}
    for token in episode.prompt.token_ids.tolist():
        ends[None] = after(ends[None], token)
    for turn in episode.turns:
        before = ends[turn.parent]
        for segment in episode.segments_of(turn):
            pairs = zip(segment.token_ids.tolist(), segment.logprobs.tolist(), strict=True)
            for token, logprob in pairs:
                if not segment.from_environment and (left or not turn.left):
                    yield before, (token, logprob, segment.version)
                before = after(before, token)
        ends[turn.number] = before


def number_of(request_id: str) -> int:
    return int(request_id[1:].partition("-")[0])


def tokens_that_arrived(one: Run) -> dict[int, dict[Before, set[Token]]]:
    """Of each trajectory, behind each beginning: what engines sent."""
    found: dict[int, dict[Before, set[Token]]] = defaultdict(lambda: defaultdict(set))
    for engine in one.engines:
        for request in engine.requests:
            before = 0
            for token in request.input_ids.tolist():
                before = after(before, token)
            for chunk in engine.chunks.get(request.request_id, []):
                pairs = zip(chunk.token_ids.tolist(), chunk.logprobs.tolist(), strict=True)
                for token, logprob in pairs:
                    number = number_of(request.request_id)
                    found[number][before].add((token, logprob, chunk.version))
                    before = after(before, token)
    return found


def assert_requests_are_prefixes(one: Run, episodes: dict[int, Trajectory]) -> None:
    stored = {i: [path_of(e, turn) for turn in e.turns] for i, e in episodes.items()}
    for engine in one.engines:
        for request in engine.requests:
            asked = request.input_ids.tolist()
            paths = stored[number_of(request.request_id)]
            assert any(asked == path[: len(asked)] for path in paths)


def assert_answers_end(episode: Trajectory, stops: tuple[int, ...], limit: int) -> None:
    """Each answer but the last one of a branch has its end, by the policy or behind it."""
    for following in episode.turns:
        if following.parent is None:
            continue
        turn = episode.turns[following.parent]
        own = [s.token_ids for s in episode.segments_of(turn) if not s.from_environment]
        answer = np.concatenate(own)
        assert turn.end is not None
        assert (answer[-1] in stops) == (turn.end == "stop")
        assert turn.end == "stop" or len(answer) == limit
        closing = episode.segments_of(following)[0].token_ids
        if turn.end == "length":
            assert set(stops) & set(closing.tolist())


def assert_trained_once(batches: list[TokenBatch], episodes: dict[int, Trajectory]) -> None:
    """Every token of the policy is trained in one sequence, behind what was before it; no other."""
    for batch in batches:
        trained: dict[int, Counter[tuple[Before, int, float, int]]] = defaultdict(Counter)
        places = zip(batch.cu_seqlens_S1, batch.cu_seqlens_S1[1:], strict=False)
        for number, (start, end) in zip(batch.trajectory_ids_S.tolist(), places, strict=True):
            ids = batch.token_ids_T[start:end].tolist()
            paths = [path_of(episodes[number], turn) for turn in episodes[number].turns]
            assert any(ids == path[: len(ids)] for path in paths)
            mask_T = batch.loss_mask_T[start:end] > 0
            logprobs_T = batch.rollout_logprobs_T[start:end]
            assert not logprobs_T[~mask_T].any()
            before = 0
            columns = zip(ids, mask_T, logprobs_T.tolist(), batch.version_T[start:end], strict=True)
            for token, own, logprob, version in columns:
                trained[number][before, token, logprob, int(version)] += int(own)
                before = after(before, token)
        for number, found in trained.items():
            written = Counter(
                (before, token, logprob, version.number)
                for before, (token, logprob, version) in own_tokens(episodes[number], left=False)
            )
            assert +found == written

"""Two thousand conversations, from the templates of four families: what is asked, stored, trained.

Requests break off, are aborted and resumed under newer weights; environments are restored in the
middle. What engines sent, and what they were sent, is written down beside the store.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.engines.interface import EngineError, GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.rollout.manager import ResumePoint
from megatron_async.tasks.text_task import load_tokenizer, stop_tokens
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion, Trajectory
from tests.environments.inside import InsidePlace
from tests.environments.templates import family_tokenizer
from tests.rollout.test_episodes import Noting, Run, configured, episodes_of, run

BREAKS_AT = 41  # every so many requests one breaks off
GROUPS, MEMBERS, BATCHES = 25, 4, 5
ROLES = {"qwen3": ("user", "tool"), "llama3": ("user", "tool"), "smollm2": ("user", "tool")}
Token = tuple[int, float, PolicyVersion]


class Breaking(Noting):
    """An engine on which some requests break off behind their first tokens."""

    numbers = itertools.count(1)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        breaks = next(self.numbers) % BREAKS_AT == 0
        async for chunk in super().generate(request):
            yield chunk
            if breaks and chunk.end is None:
                raise EngineError("the connection broke off")


def family_folder(folder: Path, family: str) -> Path:
    folder.mkdir()
    tokenizer, stops = family_tokenizer(family)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stops[0])
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama3", "smollm2", "gemma3"])
def test_conversations_keep_every_token(tmp_path: Path, family: str) -> None:
    model = family_folder(tmp_path / "model", family)
    tokenizer = load_tokenizer(str(model))
    changes: dict[str, Any] = {
        "environment": {"arguments": {"turns": 6, "roles": ROLES.get(family, ("user",))}},
        "schedule": {"groups_per_batch": GROUPS, "group_size": MEMBERS, "concurrency": 32},
        "engines": {"max_total_tokens": 100_000},
    }
    config = configured(model, game="Talkative", **changes)
    one = Run(tmp_path, config, place=InsidePlace(before=211, after=307))
    engine_model = SimulatedEngineModel(
        vocab_size=len(tokenizer), mean_length=6, step_seconds=0.001, stream_interval=2
    )
    one.engines = [Breaking(f"engine{i}", engine_model) for i in range(2)]
    batches: list[TokenBatch] = []

    async def body() -> None:
        await one.begin(ResumePoint(0))
        batches.extend(await one.train(range(BATCHES)))
        counts = one.manager._driver.statistics.counts.episodes
        assert counts["restored"] > 0
        assert counts["environment_failures"] == 0, one.manager._driver.statistics.warnings
        await one.manager.stop()

    run(body())
    episodes = episodes_of(one)
    assert sum(e.state == "batched" for e in episodes.values()) == GROUPS * MEMBERS * BATCHES
    arrived = tokens_that_arrived(one)
    stops = stop_tokens(str(model), tokenizer)
    assert_requests_are_prefixes(one, {i: whole(e) for i, e in episodes.items()})
    for episode in episodes.values():
        assert_own_tokens_arrived(episode, arrived[episode.trajectory_id])
        assert_answers_end(episode, stops, config.sampling.max_new_tokens)
    assert_trained_once(batches, episodes)
    resumed = [e for e in episodes.values() if len({s.version for s in e.segments}) > 2]
    assert resumed, "some answers are of two versions"


def whole(episode: Trajectory) -> list[int]:
    pieces = [episode.prompt.token_ids, *(s.token_ids for s in episode.segments)]
    return [int(token) for piece in pieces for token in piece]


def number_of(request_id: str) -> int:
    return int(request_id[1:].partition("-")[0])


def tokens_that_arrived(one: Run) -> dict[int, dict[int, set[Token]]]:
    """Of each trajectory, at each place: what engines sent."""
    found: dict[int, dict[int, set[Token]]] = defaultdict(lambda: defaultdict(set))
    for engine in one.engines:
        for request in engine.requests:
            place = len(request.input_ids)
            for chunk in engine.chunks.get(request.request_id, []):
                pairs = zip(chunk.token_ids.tolist(), chunk.logprobs.tolist(), strict=True)
                for token, logprob in pairs:
                    number = number_of(request.request_id)
                    found[number][place].add((token, logprob, chunk.version))
                    place += 1
    return found


def assert_requests_are_prefixes(one: Run, stored: dict[int, list[int]]) -> None:
    for engine in one.engines:
        for request in engine.requests:
            asked = request.input_ids.tolist()
            assert asked == stored[number_of(request.request_id)][: len(asked)]


def assert_own_tokens_arrived(episode: Trajectory, arrived: dict[int, set[Token]]) -> None:
    place = len(episode.prompt.token_ids)
    for segment in episode.segments:
        pairs = zip(segment.token_ids.tolist(), segment.logprobs.tolist(), strict=True)
        for token, logprob in pairs:
            if not segment.from_environment:
                assert (token, logprob, segment.version) in arrived[place]
            place += 1


def assert_answers_end(episode: Trajectory, stops: tuple[int, ...], limit: int) -> None:
    """Each answer but the last one has its end, by the policy or behind it."""
    for turn, following in itertools.pairwise(episode.turns):
        own = [s.token_ids for s in episode.segments_of(turn) if not s.from_environment]
        answer = np.concatenate(own)
        assert turn.end is not None
        assert (answer[-1] in stops) == (turn.end == "stop")
        assert turn.end == "stop" or len(answer) == limit
        closing = episode.segments_of(following)[0].token_ids
        if turn.end == "length":
            assert set(stops) & set(closing.tolist())


def assert_trained_once(batches: list[TokenBatch], episodes: dict[int, Trajectory]) -> None:
    for batch in batches:
        places = zip(batch.cu_seqlens_S1, batch.cu_seqlens_S1[1:], strict=False)
        seen = set()
        for number, (start, end) in zip(batch.trajectory_ids_S.tolist(), places, strict=True):
            assert number not in seen
            seen.add(number)
            episode = episodes[number]
            own = [np.full(len(s), not s.from_environment) for s in episode.segments]
            mask = np.concatenate([np.zeros(len(episode.prompt.token_ids), bool), *own])
            np.testing.assert_array_equal(batch.token_ids_T[start:end], whole(episode))
            np.testing.assert_array_equal(batch.loss_mask_T[start:end] > 0, mask)
            written = [s.logprobs for s in episode.segments if not s.from_environment]
            got = batch.rollout_logprobs_T[start:end][mask]
            np.testing.assert_array_equal(got, np.concatenate(written))
            assert not batch.rollout_logprobs_T[start:end][~mask].any()

"""Tests episodes on simulated engines: what is requested, stored and trained, and what survives a
kill."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.errors import ComponentFailure
from megatron_async.models.tiny_model import TinyModel, build_tiny_model, write_character_tokenizer
from megatron_async.process_backends.local import local_backend
from megatron_async.rollout import probe
from megatron_async.rollout.episodes import PLAYED_SECONDS
from megatron_async.rollout.manager import ResumePoint
from megatron_async.store import buffers
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion, Trajectory
from tests.environments.games import rows_of
from tests.environments.inside import InProcessBackend
from tests.environments.villain import BY_SEED
from tests.rollout.episode_runs import (
    LOOPS,
    SECONDS,
    Run,
    assert_engines_and_store_agree,
    assert_trained_once,
    configured,
    episodes_of,
    tokenizer,
)

__all__ = ["LOOPS", "SECONDS", "tokenizer"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store write a chunk after four tokens."""
    monkeypatch.setattr(buffers, "CHUNK_TOKENS", 4)


SHAPE = TinyModel(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_size=64)


@pytest.mark.parametrize("preset", ["sync", "rapid", "copris", "pipeline", "async"])
async def test_requested_stored_and_trained_tokens_of_episodes_are_equal(
    tmp_path: Path, tokenizer: Path, preset: str
) -> None:
    config = configured(tokenizer, preset)
    one = Run(tmp_path, config)
    batches: list[TokenBatch] = []
    await one.begin(ResumePoint(0))
    batches.extend(await one.train(range(4)))
    await one.manager.stop()
    episodes = episodes_of(one)
    assert_engines_and_store_agree(one, episodes)
    assert_trained_once(batches, episodes)
    for batch in batches:
        assert (batch.version_T[batch.loss_mask_T > 0] >= 0).all()
        if preset in ("sync", "rapid"):
            assert batch.lag_T.max() == 0
        if preset == "async":
            assert batch.lag_T.max() <= 2
    ended = [e for e in episodes.values() if e.state == "batched"]
    assert {len(e.turns) for e in ended} == {1, 2, 3}
    for episode in ended:
        assert episode.reward == pytest.approx(sum(turn.reward for turn in episode.turns))
        assert episode.reward_detail["seen"] == len(episode.turns)
        messages = [message["content"] for turn in episode.turns for message in turn.messages]
        assert messages[0] == f"seed {episode.prompt.payload['metadata']['seed']}"
        assert messages[1:] == [f"{n} of {len(episode.turns)}" for n in range(1, len(messages))]
        for turn in episode.turns:
            assert turn.answer is not None and turn.end is not None
            assert turn.answer["truncated"] == (turn.end == "length")


@pytest.mark.parametrize("on_stale", ["wait", "drop", "restart", "mask"])
async def test_trained_tokens_are_within_the_staleness_bound_when_tools_are_slow(
    tmp_path: Path, tokenizer: Path, on_stale: str
) -> None:
    environment = {"arguments": {"turns": 3, "seconds": 0.15}}
    schedule = {"max_async_level": 1, "on_stale": on_stale, "max_regenerations": 20}
    config = configured(
        tokenizer, "async", "SlowSometimes", environment=environment, schedule=schedule
    )
    one = Run(tmp_path, config)
    await one.begin(ResumePoint(0))
    batches = await one.train(range(8))
    view = one.manager._driver._scheduler.view()
    await one.manager.stop()
    lags = [int((b.step - b.version_T[b.loss_mask_T > 0]).max()) for b in batches]
    assert lags == [int(b.lag_T[b.loss_mask_T > 0].max()) for b in batches]
    assert max(lags) == 1, "the tools are too fast for the bound to matter"
    masked = sum(b.extra_metrics["rollout/stale_masked_tokens"] for b in batches)
    happened = {
        "wait": True,
        "drop": view.dropped.get("stale", 0) > 0,
        "restart": view.restarted > 0,
        "mask": masked > 0,
    }
    assert happened[on_stale]


@pytest.mark.parametrize("checkpoint", [2, 1])
async def test_sync_has_no_lag_when_episodes_survive_a_kill(
    tmp_path: Path, tokenizer: Path, checkpoint: int
) -> None:
    """The run is stopped while version 2 generates, and resumed from its checkpoint or from the one
    before."""
    environment = {"arguments": {"turns": 4, "seconds": 0.05}}
    config = configured(tokenizer, "sync", environment=environment)
    steps = range(checkpoint, checkpoint + 4)

    async def first() -> None:
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(0))
        await one.train(range(2))
        while not any(
            e.state == "waiting" and PolicyVersion(0, 2) in [s.version for s in e.segments]
            for e in episodes_of(one).values()
        ):
            await asyncio.sleep(0.01)
        await one.manager.stop()

    async def second() -> list[TokenBatch]:
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(1, checkpoint, parent=0))
        batches = await one.train(steps)
        assert one.manager._driver.statistics.counts.episodes["restored"] > 0
        await one.manager.stop()
        return batches

    await first()
    batches = await second()
    assert {int(batch.lag_T.max()) for batch in batches} == {0}
    episodes, older = episodes_of(Run(tmp_path, config)), 0
    for batch in batches:
        for number in batch.trajectory_ids_S:
            for segment in episodes[int(number)].segments:
                if not segment.from_environment:
                    lineage, made = segment.version
                    if lineage == 0:
                        older += 1
                    assert (made if lineage else min(made, checkpoint)) == batch.step
    assert older, "no token from before the kill was trained"


async def test_engines_are_verified_when_prompts_of_episodes_have_no_tokens(
    tmp_path: Path,
) -> None:
    """The simulated engine refuses a request without a token, as SGLang does."""
    weights = {"transport": "tensor", "verify": "every"}
    build_tiny_model(tmp_path / "model", seed=1, shape=SHAPE)
    kind = {"kind": "sglang"}  # With this kind, engines are verified after an update.
    run_ = Run(tmp_path, configured(tmp_path / "model", weights=weights, engines=kind))
    await run_.manager.start()
    await run_.manager.attach(ResumePoint(0))
    await run_.manager.begin_update(0, 0)
    for engine in run_.engines:
        engine.set_weights(PolicyVersion(0, 0))
    await run_.manager.end_update(0, 0, ["engine0", "engine1"], True)
    samples = await run_.manager.verification_samples(0, 0)
    assert samples is not None and samples.loss_mask_T.sum() == 2 * probe.TOKENS
    await run_.manager.stop()


async def test_turn_returns_reach_the_batch_when_credit_is_by_turn(
    tmp_path: Path, tokenizer: Path
) -> None:
    one = Run(tmp_path, configured(tokenizer, environment={"credit": "turn", "discount": 0.5}))
    await one.begin(ResumePoint(0))
    (batch,) = await one.train(range(1))
    await one.manager.stop()
    found = [episodes_of(one)[i] for i in np.unique(batch.trajectory_ids_S)]
    scored = [episode.reward for episode in found]
    assert batch.extra_metrics["rollout/reward_mean"] == pytest.approx(np.mean(scored))
    returns_T = batch.columns["turn_returns"]
    for number, start, end in zip(
        batch.trajectory_ids_S, batch.cu_seqlens_S1, batch.cu_seqlens_S1[1:], strict=False
    ):
        episode = episodes_of(one)[int(number)]
        expected = episode.returns(0.5)
        found = returns_T[start:end][batch.loss_mask_T[start:end] > 0]
        assert set(found.tolist()) <= set(np.float32(expected).tolist())
        assert found[0] == np.float32(expected[0])


@pytest.mark.parametrize("limit", ["max_turns", "context"])
async def test_episode_ends_as_length_when_a_limit_is_reached(
    tmp_path: Path, tokenizer: Path, limit: str
) -> None:
    changes: dict[str, Any] = {"environment": {"arguments": {"turns": 1000}}}
    if limit == "max_turns":
        changes["episode"] = {"max_turns": 2}
    one = Run(tmp_path, configured(tokenizer, **changes))
    await one.begin(ResumePoint(0))
    await one.train(range(1))
    await one.manager.stop()
    ended = [e for e in episodes_of(one).values() if e.state == "batched"]
    assert {e.finish_reason for e in ended} == {"length"}
    for episode in ended:
        (branch,) = episode.branches()
        if limit == "max_turns":
            assert len(episode.turns) == 2
        else:
            assert len(episode.turns) > 5
            assert 500 < len(branch.token_ids) <= 600


@pytest.mark.parametrize("game", ["Count", "KeptCount", "AsynchronousCount"])
async def test_episodes_survive_when_an_environment_worker_dies(
    tmp_path: Path, tokenizer: Path, game: str
) -> None:
    log = tmp_path / "calls"
    config = configured(
        tokenizer, game=game, environment={"arguments": {"turns": 6, "log": str(log)}}
    )
    one = Run(tmp_path, config, backend=InProcessBackend(before=37, after=53))
    await one.begin(ResumePoint(0))
    batches = await one.train(range(6))
    counts = one.manager._driver.statistics.counts.episodes
    assert counts["restored"] > 0
    assert counts["workers_lost"] > 0
    assert counts["environment_failures"] == 0, one.manager._driver.statistics.warnings
    assert batches[-1].extra_metrics["rollout/environment_calls"] > 0
    await one.manager.stop()
    assert_plays_agree(log, episodes_of(one))
    assert ("restore" in {row[1] for row in rows_of(log)}) == (game == "KeptCount")


def assert_plays_agree(log: Path, episodes: Mapping[int, Trajectory]) -> None:
    """Check that every response that an environment got is stored in the turn with its number."""
    stored: dict[tuple[int, int], set[str]] = {}
    for episode in episodes.values():
        seed = episode.prompt.payload["metadata"]["seed"]
        for turn in episode.turns:
            if turn.answer is not None:
                stored.setdefault((seed, turn.number), set()).add(turn.answer["text"])
    unfinished = {
        e.prompt.payload["metadata"]["seed"]
        for e in episodes.values()
        if e.state in ("waiting", "partial", "running", "pending")
    }
    for _, what, seed, *rest in rows_of(log):
        if what == "step":
            turn, text = rest
            assert text in stored.get((seed, turn), set()) or seed in unfinished


async def test_open_episodes_are_restored_when_the_manager_has_died(
    tmp_path: Path, tokenizer: Path
) -> None:
    arguments = {"turns": 6, "seconds": 0.05}
    config = configured(tokenizer, environment={"arguments": arguments})
    open_ids: dict[int, list[list[int]]] = {}
    stepped: set[int] = set()

    async def first() -> None:
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(0))
        await one.train(range(2))
        await asyncio.sleep(0.1)
        await one.manager.stop()
        found = episodes_of(one)
        ended = {i for i, e in found.items() if e.state == "waiting" and e.turns[-1].end}
        stepped.update(ended)
        open_ids.update(
            {
                i: [b.token_ids.tolist() for b in e.branches()]
                for i, e in found.items()
                if e.state in ("waiting", "partial") and e.turns
            }
        )

    async def second() -> None:
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(1, 2, parent=0))
        await one.train(range(2, 6))
        counts = one.manager._driver.statistics.counts.episodes
        assert counts["restored"] > 0
        # The environments of episodes that waited for a reply may have received the response.
        assert counts["steps_repeated"] == len(stepped)
        assert counts["replay_mismatches"] == counts["environment_failures"] == 0
        await one.manager.stop()
        after = episodes_of(one)
        for i, branches in open_ids.items():
            if after[i].state == "batched":
                (now,) = (b.token_ids.tolist() for b in after[i].branches())
                assert now[: len(branches[0])] == branches[0], (
                    "the episode restarted from its prompt"
                )

    await first()
    assert open_ids
    assert stepped
    await second()


async def test_played_time_of_an_episode_continues_when_the_manager_has_died(
    tmp_path: Path, tokenizer: Path
) -> None:
    """Otherwise an episode whose time restarts with every manager would never reach its limit."""
    environment = {"arguments": {"turns": 1000, "seconds": 0.05}}
    config = configured(
        tokenizer,
        game="KeptCount",
        environment=environment,
        episode={"seconds": 1.5, "max_turns": 10_000},
        engines={"max_total_tokens": 100_000},
    )

    def times(episode: Trajectory) -> list[float]:
        return [turn.answer[PLAYED_SECONDS] for turn in episode.turns if turn.answer]

    async def life(number: int, until: float) -> None:
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(number, parent=number - 1 if number else None))
        while not any(max(times(e), default=0) > until for e in episodes_of(one).values()):
            await asyncio.sleep(0.02)
        await one.manager.stop()

    async def last() -> None:
        one = Run(tmp_path, config)
        await one.begin(ResumePoint(2, parent=1))
        await one.train(range(1))
        await one.manager.stop()
        ended = [e for e in episodes_of(one).values() if e.state == "batched"]
        assert {e.finish_reason for e in ended} == {"length"}
        for episode in ended:
            found = times(episode)
            assert found == sorted(found)
            assert found[-1] > 1.5 >= max(found[:-2], default=0)

    await life(0, 0.4)
    await life(1, 0.8)
    await last()


async def test_run_continues_when_many_environments_cannot_be_restored(
    tmp_path: Path, tokenizer: Path
) -> None:
    """When the worker dies, more episodes are open than calls may fail in a row."""
    schedule = {"concurrency": 80, "open_episodes": 80, "groups_per_batch": 20}
    config = configured(
        tokenizer,
        game="RaisesInRestore",
        environment={"arguments": {"turns": 2}},
        schedule=schedule,
    )
    backend = InProcessBackend()
    one = Run(tmp_path, config, backend=backend)
    await one.begin(ResumePoint(0))
    (remote,) = backend.started
    while remote.calls.count("begin") < 80:
        await asyncio.sleep(0.001)
    remote.die()
    await one.train(range(2))
    assert one.manager._driver.statistics.counts.episodes["replay_mismatches"] > 64
    await one.manager.stop()


async def test_open_episodes_restart_from_scratch_when_resume_is_restart(
    tmp_path: Path, tokenizer: Path
) -> None:
    environment = {"arguments": {"turns": 6, "seconds": 0.01}}
    config = configured(tokenizer, environment=environment, episode={"resume": "restart"})
    one = Run(tmp_path, config)
    await one.begin(ResumePoint(0))
    await one.train(range(2))
    await one.manager.stop()
    again = Run(tmp_path, config)
    await again.begin(ResumePoint(1, 2, parent=0))
    await again.train(range(2, 4))
    assert again.manager._driver.statistics.counts.episodes["restored"] == 0
    await again.manager.stop()


@pytest.mark.parametrize("on_failure", ["regenerate", "zero", "drop"])
async def test_run_loses_only_the_episodes_whose_environment_raises(
    tmp_path: Path, tokenizer: Path, on_failure: str
) -> None:
    schedule = {"concurrency": 24, "max_regenerations": 1}
    episode = {"on_failure": on_failure}
    config = configured(tokenizer, game="Hostile", episode=episode, schedule=schedule)
    one = Run(tmp_path, config)
    await one.begin(ResumePoint(0))
    await one.train(range(2))
    statistics = one.manager._driver.statistics
    warned = statistics.warnings["environment_failed"]
    assert re.search(r"Hostile.step raised ValueError: no such move at .*games.py:\d+", warned)
    assert statistics.counts.episodes["environment_failures"] > 0
    await one.manager.stop()
    found = episodes_of(one)
    dropped = [e for e in found.values() if e.drop_reason == "environment"]
    assert dropped or on_failure != "drop"
    for episode in (e for e in found.values() if e.state == "batched"):
        odd = episode.prompt.payload["metadata"]["seed"] % 2
        assert not odd or on_failure == "zero"
        if odd:
            assert (episode.finish_reason, episode.reward) == ("length", 0.0)


async def test_run_ends_with_an_error_when_every_environment_call_fails(
    tmp_path: Path, tokenizer: Path
) -> None:
    environment = {"arguments": {"always": True}}
    one = Run(tmp_path, configured(tokenizer, game="Hostile", environment=environment))
    await one.begin(ResumePoint(0))
    sentence = r"64 calls to environment.name '.*Hostile' failed in a row and none succeeded"
    with pytest.raises(ComponentFailure, match=sentence):
        await one.train(range(1))
    await one.manager.stop()


@pytest.mark.parametrize(
    ("game", "why"), [("TrulyRandom", "sent other messages"), ("RaisesInRestore", "gone")]
)
async def test_episode_restarts_when_its_environment_cannot_be_restored(
    tmp_path: Path, tokenizer: Path, game: str, why: str
) -> None:
    schedule = {"max_regenerations": 20}
    config = configured(
        tokenizer, game=game, environment={"arguments": {"turns": 6}}, schedule=schedule
    )
    one = Run(tmp_path, config, backend=InProcessBackend(before=53))
    await one.begin(ResumePoint(0))
    await one.train(range(3))
    statistics = one.manager._driver.statistics
    assert statistics.counts.episodes["replay_mismatches"] > 0
    assert why in statistics.warnings["environment_failed"]
    await one.manager.stop()


VILLAIN = Path(__file__).parents[1] / "environments" / "villain.py"
COSTS = {"exit", "hang", "hang_async", "raise", "memory"}
MAX_STEPS = 40


def ends_by_kind(one: Run) -> dict[str, set[str]]:
    """Return the states of the episodes of each kind; for a dropped episode the reason."""
    ends: dict[str, set[str]] = {}
    for episode in episodes_of(one).values():
        kind = episode.prompt.payload["metadata"]["how"]
        ends.setdefault(kind, set()).add(episode.drop_reason or str(episode.state))
    return ends


@pytest.mark.slow
async def test_run_continues_when_environments_exit_hang_raise_and_use_memory(
    tmp_path: Path,
) -> None:
    write_character_tokenizer(tmp_path)
    rows = tmp_path / "rows.jsonl"
    problems = [
        {"prompt": f"{kind} {number}", "answer": kind, "how": kind}
        for kind in BY_SEED
        for number in range(3)  # Some rows are held out for evaluations.
    ]
    rows.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    task = {"kind": "files", "path": str(rows)}
    environment = {
        "name": f"{VILLAIN}:Villain",
        "arguments": {"marker": str(tmp_path)},
    }
    episode = {"step_seconds": 1.0, "threads": 16, "memory_mib": 1024}
    schedule = {"max_regenerations": 0, "concurrency": 12}
    changes = {"environment": environment, "episode": episode, "schedule": schedule, "task": task}
    config = configured(tmp_path, **changes)
    with local_backend(tmp_path) as backend:
        one = Run(tmp_path, config, backend=backend)  # type: ignore[arg-type]
        await one.begin(ResumePoint(0))
        statistics = one.manager._driver.statistics
        for step in range(MAX_STEPS):
            await one.train(range(step, step + 1))
            ends = ends_by_kind(one)
            failed = {kind for kind, states in ends.items() if "environment" in states}
            if failed >= COSTS and ends.keys() == set(BY_SEED) and "batched" in ends["well"]:
                break
        assert statistics.counts.episodes["environment_failures"] > 0
        assert statistics.counts.episodes["workers_lost"] > 0
        warned = statistics.warnings["environment_failed"]
        assert re.fullmatch(r"trajectory \d+ \(megatron-async .*\): [^\n]+", warned)
        await one.manager.stop()
    ends = ends_by_kind(one)
    assert ends.keys() == set(BY_SEED), ends
    assert "batched" in ends["well"], ends
    for kind in BY_SEED:
        assert ("environment" in ends[kind]) == (kind in COSTS), ends
        assert kind not in COSTS or "batched" not in ends[kind], ends

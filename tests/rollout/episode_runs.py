"""Provides runs of episodes on simulated engines, and checks of their tokens that hold for every
run."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.engines.interface import GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.process_backends.host import new_loops
from megatron_async.rollout.manager import ResumePoint, RolloutManager
from megatron_async.scoring.interface import NoScorers
from megatron_async.tasks import build_task
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion, Trajectory, Turn
from tests.environments.inside import InProcessBackend
from tests.rollout.stand_ins import trajectories_in

GAMES = str(Path(__file__).parents[1] / "environments" / "games.py")
PROGRAMS = str(Path(__file__).parents[1] / "environments" / "agent_programs.py")
# Agent programs run inside the coroutine tests that import these, so the tests use the event loop
# of environment workers.
SECONDS, LOOPS = 1200, new_loops()
# Hash of all tokens before a token.
Before = int
Token = tuple[int, float, PolicyVersion]


class RecordingEngine(SimulatedEngine):
    """Simulated engine that records every request and every chunk that it has sent."""

    def __init__(self, name: str, model: SimulatedEngineModel) -> None:
        super().__init__(name, model)
        self.requests: list[GenerationRequest] = []
        self.chunks: dict[str, list[TokenChunk]] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        async for chunk in super().generate(request):
            self.chunks.setdefault(request.request_id, []).append(chunk)
            yield chunk


class Run:
    """Rollout manager over simulated engines and environments, with the calls of its trainer."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        engines: int = 2,
        backend: InProcessBackend | None = None,
    ) -> None:
        self.folder, self.config = folder, config
        backend = backend or InProcessBackend()
        model = SimulatedEngineModel(
            mean_length=6, step_seconds=0.01, stream_interval=2, max_sequence_tokens=600
        )
        self.engines = [RecordingEngine(f"engine{i}", model) for i in range(engines)]
        self.manager = RolloutManager(
            config,
            task=build_task(config.task, config.model.path, config.eval, has_episodes=True),
            scorers=NoScorers(),
            launcher=self,
            store_file=folder / "store.sqlite",
            events_directory=folder / "events",
            environments=EnvironmentWorkers(config, backend),  # type: ignore[arg-type]
        )
        self.lineage = 0

    async def launch(self, index: int) -> SimulatedEngine:
        return self.engines[index]

    async def alive(self, index: int) -> bool:
        return not self.engines[index]._crash_reason

    async def stop(self, index: int) -> None:
        return None

    async def begin(self, resume: ResumePoint) -> None:
        await self.manager.start()
        await self.manager.attach(resume)
        await self.publish(resume.lineage, resume.step)

    async def publish(self, lineage: int, number: int) -> None:
        self.lineage = lineage
        addresses = await self.manager.begin_update(lineage, number)
        for engine in self.engines:
            engine.set_weights(PolicyVersion(lineage, number))
        ids = [address.engine_id for address in addresses]
        await self.manager.end_update(lineage, number, ids, False)
        await self.manager.verify_update(lineage, number, None, False)

    async def train(self, steps: range) -> list[TokenBatch]:
        batches = []
        for step in steps:
            batch = await self.manager.next_batch(self.lineage)
            assert isinstance(batch, TokenBatch) and batch.step == step
            batches.append(batch)
            await self.publish(self.lineage, step + 1)
        return batches


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_character_tokenizer(folder)
    return folder


def configured(
    tokenizer: Path, preset: str = "copris", game: str = "Count", **changes: Any
) -> RunConfig:
    schedule = {"preset": preset, "groups_per_batch": 3, "group_size": 2, "concurrency": 6}
    own: dict[str, Any] = {
        "steps": 1000,
        "trainer": {"wait_for_batch_seconds": 240},
        "eval": {"prompts": 2},
        "model": {"path": str(tokenizer)},
        "engines": {
            "kind": "simulated",
            "count": 2,
            "max_total_tokens": 606,
        },
        "weights": {"transport": "tensor", "verify": "never"},
        "task": {"kind": "seeds"},
        "environment": {"name": f"{GAMES}:{game}"},
        "sampling": {"max_new_tokens": 12},
        "schedule": {**schedule, **({"updates_per_batch": 2} if preset == "rapid" else {})},
        "store": {"compact_after_checkpoints": 100},
    }
    return build_config(merge(own, changes))


def episodes_of(run_: Run) -> dict[int, Trajectory]:
    return trajectories_in(run_.folder)


def with_agent(
    folder: Path, rows: Path, program: str, preset: str = "copris", **changes: Any
) -> RunConfig:
    """Return the settings of a run whose agent is one of the test programs, for the prompts `ask 0
    `, `ask 1 ` and so on."""
    problems = [{"prompt": f"ask {n} ", "answer": f"{n}"} for n in range(200)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in problems))
    agent = {"name": f"{PROGRAMS}:{program}", **changes.pop("agent", {})}
    task = {"kind": "files", "path": str(rows)}
    return configured(folder, preset, environment={"name": ""}, agent=agent, task=task, **changes)


def after(before: Before, token: int) -> Before:
    return hash((before, token))


def path_of(episode: Trajectory, turn: Turn) -> list[int]:
    """Return the tokens from the start of the prompt to the end of `turn`, along its branch."""
    parts = [s.token_ids for t in episode.path(turn) for s in episode.segments_of(t)]
    return [int(token) for part in (episode.prompt.token_ids, *parts) for token in part]


def own_tokens(episode: Trajectory, *, include_abandoned: bool) -> Iterator[tuple[Before, Token]]:
    """Yield each token of the policy once, with a hash of the tokens before it in its branch.

    Args:
        include_abandoned: Whether to include tokens of responses that the agent program never got.
    """
    ends: dict[int | None, Before] = {None: 0}
    for token in episode.prompt.token_ids.tolist():
        ends[None] = after(ends[None], token)
    for turn in episode.turns:
        before = ends[turn.parent]
        for segment in episode.segments_of(turn):
            pairs = zip(segment.token_ids.tolist(), segment.logprobs.tolist(), strict=True)
            for token, logprob in pairs:
                if not segment.from_environment and (include_abandoned or not turn.abandoned):
                    yield before, (token, logprob, segment.version)
                before = after(before, token)
        ends[turn.number] = before


def number_of(request_id: str) -> int:
    return int(request_id[1:].partition("-")[0])


def tokens_that_arrived(one: Run) -> dict[int, dict[Before, set[Token]]]:
    """Return the tokens that engines sent, by trajectory and by hash of the tokens before them."""
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
            input_ids = request.input_ids.tolist()
            paths = stored[number_of(request.request_id)]
            assert any(input_ids == path[: len(input_ids)] for path in paths)


def assert_answers_end(episode: Trajectory, stops: tuple[int, ...], limit: int) -> None:
    """Check that each response but the last of a branch ends with a stop token or at the limit.

    After a response that was cut at the limit, the next input contains a stop token that closes it.
    """
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
    """Check that each token of the policy is trained in exactly one sequence, after the right
    tokens, and no other token is."""
    for batch in batches:
        trained: dict[int, Counter[tuple[Before, int, float, int]]] = defaultdict(Counter)
        bounds = zip(batch.cu_seqlens_S1, batch.cu_seqlens_S1[1:], strict=False)
        for number, (start, end) in zip(batch.trajectory_ids_S.tolist(), bounds, strict=True):
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
                for before, (token, logprob, version) in own_tokens(
                    episodes[number], include_abandoned=False
                )
            )
            assert +found == written


def assert_engines_and_store_agree(one: Run, episodes: dict[int, Trajectory]) -> None:
    """Check that each request is the start of a branch of its episode, and that the tokens sent for
    it are stored after it."""
    for engine in one.engines:
        for request in engine.requests:
            episode = episodes[number_of(request.request_id)]
            if episode.state == "dropped":
                continue
            input_ids = request.input_ids.tolist()
            sent = [int(t) for c in engine.chunks.get(request.request_id, []) for t in c.token_ids]
            paths = [path_of(episode, turn) for turn in episode.turns]
            assert any(
                path[: len(input_ids)] == input_ids
                and path[len(input_ids) :][: len(sent)] == sent[: len(path) - len(input_ids)]
                for path in paths
            )

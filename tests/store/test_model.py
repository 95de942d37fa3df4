"""The store against a plain in-memory model: random lives, crashes, rollbacks, compaction.

The model has no lineages: it keeps, with each checkpoint, a copy of what was consumed then.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from megatron_async.config.rollout import StoreConfig
from megatron_async.store import buffers
from megatron_async.store.records import SupersededRequest
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import (
    DropReason,
    FinishReason,
    PolicyVersion,
    RequestKey,
    TrajectoryState,
)
from tests.trajectory.builders import STORE, current, prompt, snapshot, tokens_of

S = TrajectoryState
T = TypeVar("T")
CHUNK = 8
STARTED = (S.RUNNING, S.PARTIAL, S.FINISHED, S.SCORED)
DROPPABLE = (S.PENDING, S.RUNNING, S.PARTIAL, S.SCORED)
MOST_GROUPS = 6  # in work at a time, so that each gets its share of what happens


@dataclass
class Life:
    """What is true of one trajectory, on every lineage."""

    group: int
    state: TrajectoryState = S.PENDING
    tokens: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    reward: float | None = None
    drop: DropReason | None = None


class StoreMachine(RuleBasedStateMachine):
    happened: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.lives_lived = 0
        self.lineage, self.step = 0, 0
        self.lives: dict[int, Life] = {}
        self.members: dict[int, list[int]] = {}
        self.consumed: dict[int, int] = {}  # trajectory -> step, on the current lineage
        self.checkpoints: dict[PolicyVersion, dict[int, int]] = {PolicyVersion(0, 0): {}}
        self.committed = 0  # the newest step that a checkpoint of this lineage, or its start, holds
        self.position = 0
        self.requests: list[RequestKey] = []  # all that there were
        self.clock = 0
        self.acts = 0

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        async def both() -> T:
            return await work

        return self.loop.run_until_complete(both())

    @property
    def run_dir(self) -> Path:
        return self.root / str(self.lives_lived)

    @initialize(compact_after=st.integers(1, 2))
    def start(self, compact_after: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(buffers, "CHUNK_TOKENS", CHUNK)
        self.patch.setattr(buffers, "CHUNK_SECONDS", 1000.0)
        self.settings = StoreConfig(compact_after_checkpoints=compact_after)
        self.store = TrajectoryStore.open(self.run_dir / STORE, self.settings)

    @rule(seed=st.integers(0, 2**32 - 1))
    def act(self, seed: int) -> None:
        """Something that can happen now. One rule: hypothesis would else switch rules off."""
        self.acts += 1  # hypothesis likes the same few numbers
        rng = random.Random(seed * 1009 + self.acts)
        can: dict[Callable[[random.Random], None], float] = {
            self.add_group: 3 * (len(self.unfinished()) < MOST_GROUPS),
            self.run: 6 * bool(self.having(S.PENDING, S.PARTIAL)),
            self.append: 8 * bool(self.having(S.RUNNING)),
            self.superseded: 2 * bool(self.requests),
            self.pause: 2 * bool(self.having(S.RUNNING)),
            self.finish: 2 * bool(self.having(S.RUNNING)),
            self.score: 2 * bool(self.having(S.FINISHED)),
            self.complete: 3 * bool(self.unfinished()),
            self.restart: 1 * bool(self.having(*STARTED)),
            self.drop: 0.5 * bool(self.having(*DROPPABLE)),
            self.train: 4 * bool(self.ready()),
            self.nonfinite: 1 * self.newest_batch_is_not_committed(),
            self.checkpoint: 1.5,
            self.resume: 1,
        }
        (action,) = rng.choices(list(can), list(can.values()))
        self.happened[action.__name__] += 1
        action(rng)

    # ------------------------------------------------------------ a trajectory's life

    def unfinished(self) -> list[int]:
        """Groups with a trajectory that is not scored, consumed or dropped."""
        done = (S.BATCHED, S.DROPPED, S.SCORED)
        return [g for g, ids in self.members.items() if any(self.shown(i) not in done for i in ids)]

    def add_group(self, rng: random.Random) -> None:
        group = self.store.add_group(prompt(), rng.randint(1, 2))
        ids = [t.trajectory_id for t in group.trajectories]
        assert not set(ids) & set(self.lives)
        self.members[group.group_id] = ids
        self.lives.update((i, Life(group.group_id)) for i in ids)

    def having(self, *states: TrajectoryState) -> list[int]:
        return [i for i in self.lives if self.shown(i) in states]

    def pick(self, rng: random.Random, *states: TrajectoryState) -> int:
        return rng.choice(self.having(*states))

    def shown(self, i: int) -> TrajectoryState:
        return S.BATCHED if i in self.consumed else self.lives[i].state

    def run(self, rng: random.Random) -> None:
        self.begin(self.pick(rng, S.PENDING, S.PARTIAL))

    def begin(self, i: int) -> None:
        self.requests.append(self.store.begin_request(i))
        self.lives[i].state = S.RUNNING

    def superseded(self, rng: random.Random) -> None:
        """What a request writes that does not run its trajectory any more is refused whole."""
        running = {current(self.store, i) for i in self.having(S.RUNNING)}
        for request in self.requests:
            if request in running:
                continue
            end = rng.choice([None, FinishReason.STOP])
            with pytest.raises(SupersededRequest):
                self.store.append(request, [7], [-1.0], PolicyVersion(0, 0), "ghost", end=end)
            with pytest.raises(SupersededRequest):
                self.store.end_request(request)

    def append(self, rng: random.Random) -> None:
        self.add_tokens(self.pick(rng, S.RUNNING), rng)

    def add_tokens(self, i: int, rng: random.Random) -> None:
        count, behind = rng.randint(1, 20), rng.randint(0, 1)
        self.clock += 1
        version = PolicyVersion(self.lineage, max(0, self.step - behind))
        tokens, logprobs = tokens_of(i, self.clock * 100, count)
        self.store.append(current(self.store, i), tokens, logprobs, version, "e0")
        self.lives[i].tokens += [(int(token), version) for token in tokens]

    def pause(self, rng: random.Random) -> None:
        i = self.pick(rng, S.RUNNING)
        self.store.end_request(current(self.store, i))
        self.lives[i].state = S.PARTIAL

    def finish(self, rng: random.Random) -> None:
        i = self.pick(rng, S.RUNNING)
        self.store.end(i, FinishReason.STOP)
        self.wait(self.store.sync())
        self.lives[i].state = S.FINISHED

    def score(self, rng: random.Random) -> None:
        i = self.pick(rng, S.FINISHED)
        self.wait(self.store.set_reward(i, i / 2))
        self.lives[i].state, self.lives[i].reward = S.SCORED, i / 2

    def complete(self, rng: random.Random) -> None:
        """The usual end of a group, so that batches are not rare."""
        for i in self.members[rng.choice(self.unfinished())]:
            life = self.lives[i]
            if self.shown(i) in (S.PENDING, S.PARTIAL):
                self.begin(i)
            if self.shown(i) is S.RUNNING:
                self.add_tokens(i, rng)
                self.store.end(i, FinishReason.STOP)
                self.wait(self.store.sync())
                life.state = S.FINISHED
            if self.shown(i) is S.FINISHED:
                self.wait(self.store.set_reward(i, 1.0))
                life.state, life.reward = S.SCORED, 1.0

    def restart(self, rng: random.Random) -> None:
        i = self.pick(rng, *STARTED)
        self.store.restart(i)
        self.lives[i] = Life(self.lives[i].group)

    def drop(self, rng: random.Random) -> None:
        i, reason = self.pick(rng, *DROPPABLE), rng.choice(list(DropReason))
        self.store.drop(i, reason)
        self.lives[i].state, self.lives[i].drop = S.DROPPED, reason

    # ------------------------------------------------------------ batches, checkpoints, crashes

    def ready(self) -> list[int]:
        """Groups that are complete: scored but for dropped members, at least one scored."""
        return [
            group
            for group, ids in self.members.items()
            if {self.shown(i) for i in ids} - {S.DROPPED} == {S.SCORED}
        ]

    def train(self, rng: random.Random) -> None:
        ready = self.ready()
        chosen = rng.sample(ready, rng.randint(1, len(ready)))
        self.store.mark_batched(chosen, self.step)
        for group in chosen:
            for i in self.members[group]:
                if self.shown(i) is S.SCORED:
                    self.consumed[i] = self.step
        self.step += 1

    def nonfinite(self, rng: random.Random) -> None:
        """The newest batch cannot be used."""
        self.step -= 1
        self.store.drop_batch(self.step, DropReason.NONFINITE)
        for i in [i for i, step in self.consumed.items() if step == self.step]:
            del self.consumed[i]
            self.lives[i].state, self.lives[i].drop = S.DROPPED, DropReason.NONFINITE

    def newest_batch_is_not_committed(self) -> bool:
        """Whether it was made on the current lineage and is in no checkpoint."""
        return self.step > self.committed

    def checkpoint(self, rng: random.Random) -> None:
        self.position = self.wait(self.store.sync(durable=True))
        here = PolicyVersion(self.lineage, self.step)
        older = [v for v in self.checkpoints if v.number != self.step]  # one directory for a step
        kept = [v for v in older if rng.random() < 0.6]
        self.checkpoints = {v: self.checkpoints[v] for v in kept}
        self.checkpoints[here] = dict(self.consumed)
        self.committed = self.step
        self.wait(self.store.checkpoint_finalized(self.step, list(self.checkpoints)))
        self.wait(self.store._compactor.finish())
        self.forget_exported()

    def forget_exported(self) -> None:
        """Compare what left with the rule, then leave it out of the model."""
        file = self.run_dir / "export" / "trajectories.jsonl"
        text = file.read_text() if file.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        assert len({line["trajectory_id"] for line in lines}) == len(lines)
        for line in lines:
            i = line["trajectory_id"]
            life = self.lives.get(i)
            if life is None:
                continue
            if life.drop is None or i in self.consumed:
                assert i in self.consumed
            if life.drop is None:
                assert all(i in consumed for consumed in self.checkpoints.values())
            got = [token for segment in line["segments"] for token in segment["token_ids"]]
            assert got == [token for token, _ in life.tokens]
            del self.lives[i]
            self.happened["exported"] += 1
            self.consumed.pop(i, None)
            for consumed in self.checkpoints.values():
                consumed.pop(i, None)
            self.members.pop(line["group_id"], None)

    def resume(self, rng: random.Random) -> None:
        """End or kill the process, then go on from any kept checkpoint."""
        crash, newest = rng.random() < 0.6, rng.random() < 0.5
        self.wait(self.store.sync())
        old = self.run_dir
        self.lives_lived += 1
        if crash:
            snapshot(old, self.run_dir)
        self.wait(self.store.close())
        if not crash:
            snapshot(old, self.run_dir)
        shutil.rmtree(old)
        version = max(self.checkpoints) if newest else None
        version = version or rng.choice(sorted(self.checkpoints))
        self.lineage += 1
        self.step = self.committed = version.number
        self.consumed = copy.copy(self.checkpoints[version])
        self.store = TrajectoryStore.open(
            self.run_dir / STORE,
            self.settings,
            lineage=self.lineage,
            step=version.number,
            parent=version.lineage,
            position=self.position,
        )
        assert self.store.recovery is None
        for i, life in self.lives.items():
            found = self.store.load_trajectory(i)
            if life.state is S.RUNNING:
                lost = len(life.tokens) - found.response_length
                assert 0 <= lost < (CHUNK if crash else 1), "more than a chunk is lost"
                life.tokens = life.tokens[: found.response_length]
                life.state = S.PARTIAL
            self.compare(i)

    def compare(self, i: int) -> None:
        life, found = self.lives[i], self.store.load_trajectory(i)
        assert found.state is self.shown(i)
        assert found.batched_step == self.consumed.get(i)
        assert found.reward == life.reward
        if i not in self.consumed:
            assert found.drop_reason is life.drop
        got = [(int(token), s.version) for s in found.segments for token in s.token_ids]
        assert got == life.tokens

    @invariant()
    def unconsumed_groups_are_those_of_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        wanted = [
            group
            for group, ids in self.members.items()
            if any(self.shown(i) not in (S.BATCHED, S.DROPPED) for i in ids)
        ]
        state = self.store._state
        found = [
            g
            for g, r in state.groups.items()
            if any(state.records[i].live for i in r.trajectory_ids)
        ]
        assert found == wanted
        assert sum(self.store.counts().values()) == self.store._state.counters.next_trajectory
        assert self.store.counts() == state.counts(), "what is kept is not what is there"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.wait(self.store.close())
            self.patch.undo()
        self.loop.close()
        shutil.rmtree(self.root, ignore_errors=True)


SETTINGS = settings(
    max_examples=20,
    stateful_step_count=80,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.one_core
def test_the_store_equals_the_model() -> None:
    StoreMachine.happened.clear()
    run_state_machine_as_test(StoreMachine, settings=SETTINGS)
    happened = StoreMachine.happened
    for name in ("append", "resume", "restart", "superseded", "train", "nonfinite", "exported"):
        assert happened[name] >= 5, f"the model hardly saw {name}: {happened}"

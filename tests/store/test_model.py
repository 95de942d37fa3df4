"""Compares the store with a plain model in memory under random actions.

The actions are those of a run: generation, crashes, rollbacks, compaction and others. The model has
no lineages: with each checkpoint it keeps a copy of what was consumed then.
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
# Largest number of unfinished groups; with few groups, each takes part in many actions.
MAX_GROUPS = 6


@dataclass
class ModelTrajectory:
    """The model of one trajectory: what must be true of it on every lineage."""

    group: int
    state: TrajectoryState = S.PENDING
    tokens: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    reward: float | None = None
    drop: DropReason | None = None


class StoreMachine(RuleBasedStateMachine):
    executed: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.resumes = 0
        self.lineage, self.step = 0, 0
        self.trajectories: dict[int, ModelTrajectory] = {}
        self.members: dict[int, list[int]] = {}
        # The step in which each trajectory was consumed, on the current lineage.
        self.consumed: dict[int, int] = {}
        self.checkpoints: dict[PolicyVersion, dict[int, int]] = {PolicyVersion(0, 0): {}}
        # Step of the newest checkpoint on this lineage, or the step at which the lineage began.
        self.committed = 0
        self.position = 0
        self.requests: list[RequestKey] = []  # All requests so far.
        self.clock = 0
        self.acts = 0

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        async def both() -> T:
            return await work

        return self.loop.run_until_complete(both())

    @property
    def run_dir(self) -> Path:
        return self.root / str(self.resumes)

    @initialize(compact_after=st.integers(1, 2))
    def start(self, compact_after: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(buffers, "CHUNK_TOKENS", CHUNK)
        self.patch.setattr(buffers, "CHUNK_SECONDS", 1000.0)
        self.settings = StoreConfig(compact_after_checkpoints=compact_after)
        self.store = TrajectoryStore.open(self.run_dir / STORE, self.settings)

    @rule(seed=st.integers(0, 2**32 - 1))
    def act(self, seed: int) -> None:
        """Do one random action of those that are possible now.

        All actions are one rule, since hypothesis would switch some of several rules off.
        """
        self.acts += 1  # Varies the seed, as hypothesis tends to choose the same few seeds.
        rng = random.Random(seed * 1009 + self.acts)
        can: dict[Callable[[random.Random], None], float] = {
            self.add_group: 3 if len(self.unfinished()) < MAX_GROUPS else 0,
            self.run: 6 if self.in_states(S.PENDING, S.PARTIAL) else 0,
            self.append: 8 if self.in_states(S.RUNNING) else 0,
            self.late_write: 2 if self.requests else 0,
            self.pause: 2 if self.in_states(S.RUNNING) else 0,
            self.finish: 2 if self.in_states(S.RUNNING) else 0,
            self.score: 2 if self.in_states(S.FINISHED) else 0,
            self.complete: 3 if self.unfinished() else 0,
            self.restart: 1 if self.in_states(*STARTED) else 0,
            self.drop: 0.5 if self.in_states(*DROPPABLE) else 0,
            self.train: 4 if self.ready() else 0,
            self.nonfinite: 1 if self.newest_batch_is_not_committed() else 0,
            self.checkpoint: 1.5,
            self.resume: 1,
        }
        (action,) = rng.choices(list(can), list(can.values()))
        self.executed[action.__name__] += 1
        action(rng)

    # ------------------------------------------------------------ a trajectory's states

    def unfinished(self) -> list[int]:
        """Return the groups with a trajectory that is neither scored, consumed nor dropped."""
        done = (S.BATCHED, S.DROPPED, S.SCORED)
        return [g for g, ids in self.members.items() if any(self.shown(i) not in done for i in ids)]

    def add_group(self, rng: random.Random) -> None:
        group = self.store.add_group(prompt(), rng.randint(1, 2))
        ids = [t.trajectory_id for t in group.trajectories]
        assert not set(ids) & set(self.trajectories)
        self.members[group.group_id] = ids
        self.trajectories.update((i, ModelTrajectory(group.group_id)) for i in ids)

    def in_states(self, *states: TrajectoryState) -> list[int]:
        return [i for i in self.trajectories if self.shown(i) in states]

    def pick(self, rng: random.Random, *states: TrajectoryState) -> int:
        return rng.choice(self.in_states(*states))

    def shown(self, i: int) -> TrajectoryState:
        return S.BATCHED if i in self.consumed else self.trajectories[i].state

    def run(self, rng: random.Random) -> None:
        self.begin_request_of(self.pick(rng, S.PENDING, S.PARTIAL))

    def begin_request_of(self, i: int) -> None:
        self.requests.append(self.store.begin_request(i))
        self.trajectories[i].state = S.RUNNING

    def late_write(self, rng: random.Random) -> None:
        """Check that the store refuses every write of requests that are not current any more."""
        running = {current(self.store, i) for i in self.in_states(S.RUNNING)}
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
        self.trajectories[i].tokens += [(int(token), version) for token in tokens]

    def pause(self, rng: random.Random) -> None:
        i = self.pick(rng, S.RUNNING)
        self.store.end_request(current(self.store, i))
        self.trajectories[i].state = S.PARTIAL

    def finish(self, rng: random.Random) -> None:
        i = self.pick(rng, S.RUNNING)
        self.store.end(i, FinishReason.STOP)
        self.wait(self.store.sync())
        self.trajectories[i].state = S.FINISHED

    def score(self, rng: random.Random) -> None:
        i = self.pick(rng, S.FINISHED)
        self.wait(self.store.set_reward(i, i / 2))
        self.trajectories[i].state, self.trajectories[i].reward = S.SCORED, i / 2

    def complete(self, rng: random.Random) -> None:
        """Generate and score all trajectories of a group, so that batches are not rare."""
        for i in self.members[rng.choice(self.unfinished())]:
            model = self.trajectories[i]
            if self.shown(i) in (S.PENDING, S.PARTIAL):
                self.begin_request_of(i)
            if self.shown(i) is S.RUNNING:
                self.add_tokens(i, rng)
                self.store.end(i, FinishReason.STOP)
                self.wait(self.store.sync())
                model.state = S.FINISHED
            if self.shown(i) is S.FINISHED:
                self.wait(self.store.set_reward(i, 1.0))
                model.state, model.reward = S.SCORED, 1.0

    def restart(self, rng: random.Random) -> None:
        i = self.pick(rng, *STARTED)
        self.store.restart(i)
        self.trajectories[i] = ModelTrajectory(self.trajectories[i].group)

    def drop(self, rng: random.Random) -> None:
        i, reason = self.pick(rng, *DROPPABLE), rng.choice(list(DropReason))
        self.store.drop(i, reason)
        self.trajectories[i].state, self.trajectories[i].drop = S.DROPPED, reason

    # ------------------------------------------------------------ batches, checkpoints, crashes

    def ready(self) -> list[int]:
        """Return the groups whose trajectories are all scored or dropped, and not all dropped."""
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
        """Drop the newest batch, as a trainer does that cannot use it."""
        self.step -= 1
        self.store.drop_batch(self.step, DropReason.NONFINITE)
        for i in [i for i, step in self.consumed.items() if step == self.step]:
            del self.consumed[i]
            self.trajectories[i].state, self.trajectories[i].drop = S.DROPPED, DropReason.NONFINITE

    def newest_batch_is_not_committed(self) -> bool:
        """Return whether a batch was made on the current lineage since its newest checkpoint."""
        return self.step > self.committed

    def checkpoint(self, rng: random.Random) -> None:
        self.position = self.wait(self.store.sync(durable=True))
        here = PolicyVersion(self.lineage, self.step)
        older = [v for v in self.checkpoints if v.number != self.step]  # A step has one directory.
        kept = [v for v in older if rng.random() < 0.6]
        self.checkpoints = {v: self.checkpoints[v] for v in kept}
        self.checkpoints[here] = dict(self.consumed)
        self.committed = self.step
        self.wait(self.store.checkpoint_finalized(self.step, list(self.checkpoints)))
        self.wait(self.store._compactor.finish())
        self.forget_exported()

    def forget_exported(self) -> None:
        """Check that compaction exported what it may export, and remove it from the model."""
        file = self.run_dir / "export" / "trajectories.jsonl"
        text = file.read_text() if file.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        assert len({line["trajectory_id"] for line in lines}) == len(lines)
        for line in lines:
            i = line["trajectory_id"]
            model = self.trajectories.get(i)
            if model is None:
                continue
            if model.drop is None or i in self.consumed:
                assert i in self.consumed
            if model.drop is None:
                assert all(i in consumed for consumed in self.checkpoints.values())
            got = [token for segment in line["segments"] for token in segment["token_ids"]]
            assert got == [token for token, _ in model.tokens]
            del self.trajectories[i]
            self.executed["exported"] += 1
            self.consumed.pop(i, None)
            for consumed in self.checkpoints.values():
                consumed.pop(i, None)
            self.members.pop(line["group_id"], None)

    def resume(self, rng: random.Random) -> None:
        """Close or kill the store, then resume from a random kept checkpoint and compare."""
        crash, newest = rng.random() < 0.6, rng.random() < 0.5
        self.wait(self.store.sync())
        old = self.run_dir
        self.resumes += 1
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
        for i, model in self.trajectories.items():
            found = self.store.load_trajectory(i)
            if model.state is S.RUNNING:
                lost = len(model.tokens) - found.response_length
                assert 0 <= lost < (CHUNK if crash else 1), "more than a chunk was lost"
                model.tokens = model.tokens[: found.response_length]
                model.state = S.PARTIAL
            self.compare(i)

    def compare(self, i: int) -> None:
        model, found = self.trajectories[i], self.store.load_trajectory(i)
        assert found.state is self.shown(i)
        assert found.batched_step == self.consumed.get(i)
        assert found.reward == model.reward
        if i not in self.consumed:
            assert found.drop_reason is model.drop
        got = [(int(token), s.version) for s in found.segments for token in s.token_ids]
        assert got == model.tokens

    @invariant()
    def unconsumed_groups_equal_those_of_the_model(self) -> None:
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
        assert self.store.counts() == state.counts(), (
            "the maintained counts differ from recounted ones"
        )

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
def test_store_equals_the_model_after_random_actions() -> None:
    StoreMachine.executed.clear()
    run_state_machine_as_test(StoreMachine, settings=SETTINGS)
    executed = StoreMachine.executed
    for name in ("append", "resume", "restart", "late_write", "train", "nonfinite", "exported"):
        assert executed[name] >= 5, f"the action {name} was executed too rarely: {executed}"

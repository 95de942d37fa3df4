"""Tests of the simulated engine: its decode batch, advanced in closed form, against a batch that is
advanced token by token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.config.simulate import SimulateConfig
from megatron_async.simulate.engine import Engine, SimulatedRequest

FIXED, PER_KV, PREFILL = 0.01, 1e-6, 1e-5


@dataclass(frozen=True)
class Costs:
    """Cost model in which a decode step takes FIXED + FIXED x batch / 100 + PER_KV x KV, and
    prefill PREFILL a token."""

    kv_capacity_tokens: int = 10**9
    request_seconds: float = 0.0

    def decode(self, batch: int) -> tuple[float, float]:
        return FIXED * (1 + batch / 100), PER_KV

    def prefill(self, tokens: int, token_pairs: float) -> float:
        return PREFILL * tokens


def make(
    capacity: int = 10**9, reserve: int = 0, chunk: int = 10**6, slots: int | None = None
) -> Engine:
    rules = SimulateConfig(admission_reserve_tokens=reserve, retract_steps=20, chunk_tokens=chunk)
    return Engine("engine-0", Costs(capacity), rules, slots)


def drive(engine: Engine, until: float = float("inf")) -> dict[int, float]:
    """Process the engine's events until none is left or until virtual time `until`; return
    completion times by trajectory id."""
    finished: dict[int, float] = {}
    while True:
        engine.admit()
        when = engine.forecast()
        if when is None or when > until:
            if until < float("inf"):
                engine.advance(until)
            return finished
        engine.advance(when)
        for request in engine.completed():
            finished[request.trajectory_id] = when
        engine.preempt()
        engine.report_due()
        assert engine.kv <= engine.costs.kv_capacity_tokens * (1 + 1e-9)


def stepped(lengths: list[int], prompt: int) -> dict[int, float]:
    """Return the completion times by trajectory id when each decode step is simulated singly; every
    request has a different prompt."""
    now = PREFILL * prompt * len(lengths)
    finished: dict[int, float] = {}
    running = dict(enumerate(lengths))
    step = 0
    while running:
        kv = sum(prompt + step for _ in running)
        fixed, per_kv = Costs().decode(len(running))
        # The KV size in the middle of the step counts.
        now += fixed + per_kv * (kv + len(running) / 2)
        step += 1
        for i in [i for i, length in running.items() if length == step]:
            del running[i]
            finished[i] = now
    return finished


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 500))
@settings(max_examples=50)
def test_engine_completes_requests_when_single_steps_would(lengths: list[int], prompt: int) -> None:
    engine = make()
    for i, length in enumerate(lengths):
        engine.submit(SimulatedRequest(i, i, prompt, 0, length))
    assert drive(engine) == pytest.approx(stepped(lengths, prompt), rel=1e-9)


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    capacity=st.integers(250, 2000),
    reserve=st.integers(0, 50),
    slots=st.one_of(st.none(), st.integers(1, 10)),
)
@settings(max_examples=100)
def test_engine_loses_no_token_when_full_cache_preempts(
    lengths: list[int], capacity: int, reserve: int, slots: int | None
) -> None:
    engine = make(capacity, reserve, slots=slots)
    for i, length in enumerate(lengths):
        engine.submit(SimulatedRequest(i, i, 40, 0, length))
    assert sorted(drive(engine)) == list(range(len(lengths)))
    # A preempted request generates its current token again.
    surplus = engine.counters.generated - sum(lengths)
    assert -1e-3 <= surplus <= engine.counters.preemptions + 1e-3
    assert (engine.counters.preempted_prefill > 0) == (engine.counters.preemptions > 0)
    assert engine.kv == 0 and not engine._waiting


def test_tokens_get_the_version_at_the_end_of_their_step() -> None:
    engine = make()
    engine.submit(SimulatedRequest(0, 0, 1, 0, 100))
    engine.admit()
    engine.forecast()
    for number, steps in ((1, 30), (2, 20)):
        fixed, per_kv = engine.costs.decode(1)
        seconds = steps * (fixed + per_kv * engine.kv) + per_kv * steps**2 / 2
        engine.advance(engine.now + engine.stall + seconds + 1e-9)
        engine.load(number)
        engine.forecast()
    finished = drive(engine)
    request = SimulatedRequest(0, 0, 1, 0, 100)
    assert list(finished) == [0]
    assert engine.take_tokens(request) == [(0, 30), (1, 20), (2, 50)]
    assert engine.take_tokens(request) == []


def test_pause_stops_decoding_and_recompute_costs_a_prefill() -> None:
    for recompute in (False, True):
        engine = make()
        engine.submit(SimulatedRequest(0, 0, 100, 0, 50))
        drive(engine, until=0.2)
        before, kv = engine.steps, round(engine.kv)
        engine.pause(recompute=recompute)
        engine.advance(5.0)
        assert engine.steps == before
        assert engine.forecast() is None
        engine.resume()
        assert engine.stall == pytest.approx(kv * PREFILL if recompute else 0.0, rel=0.02)
        assert abs(engine.counters.updated_prefill - (kv if recompute else 0)) <= 1
        assert list(drive(engine)) == [0]


@pytest.mark.parametrize("recompute", [False, True])
def test_prompt_is_not_shared_when_older_weights_computed_it(recompute: bool) -> None:
    engine = make()
    engine.submit(SimulatedRequest(0, 7, 100, 0, 50))
    engine.admit()
    engine.pause(recompute=recompute)
    engine.load(1)
    engine.resume()
    for trajectory_id in (1, 2):
        engine.submit(SimulatedRequest(trajectory_id, 7, 100, 0, 50))
    engine.admit()
    assert engine.kv == (100 if recompute else 200), "members with equal weights share the prompt"
    assert engine.cancel([0])
    assert engine.kv == 100
    engine.cancel([1, 2])
    assert engine.kv == 0


@pytest.mark.parametrize("canceled", [range(2), range(4), range(6)])
def test_cancel_frees_the_kv_of_all_requests_canceled_together(canceled: range) -> None:
    engine = make(slots=4)
    for i in range(6):
        engine.submit(SimulatedRequest(i, i // 2, 100, 0, 50))
    engine.admit()
    requests = dict(engine.running)
    engine.forecast()
    engine.advance(engine.now + engine.stall + 0.1)
    canceled_tokens = engine.cancel(canceled)
    assert [trajectory_id for trajectory_id, _ in canceled_tokens] == list(canceled)
    for trajectory_id, tokens in canceled_tokens:
        if trajectory_id in requests:
            request = requests[trajectory_id]
            assert tokens == request.written == [(0, request.before)]
            assert request.before + request.remaining == 50 and request.before > 0
    remaining = len(engine.running)
    assert remaining == max(0, 4 - len(canceled))
    assert engine.kv == pytest.approx(remaining // 2 * 100 + remaining * engine.steps)


class PassCosts(Costs):
    """Cost model in which a prefill pass takes one second, and a decode step as in `Costs`."""

    def prefill(self, tokens: int, token_pairs: float) -> float:
        return 1.0


def submit(engine: Engine, first: int, count: int, prompt: int) -> None:
    """Submit requests of different groups at the present time, and admit them."""
    for number in range(first, first + count):
        engine.submit(SimulatedRequest(number, number, prompt, 0, 10))
    engine.admit()


def test_requests_that_arrive_together_share_prefill_passes() -> None:
    """340 requests of 200 tokens are 68,000 tokens, which are 9 passes of at most 8,192 tokens."""
    engine = Engine("engine-0", PassCosts(), SimulateConfig(admission_reserve_tokens=0), None)
    submit(engine, 0, 340, 200)
    assert engine.stall == pytest.approx(9.0)
    assert engine.counters.prefilled == 68_000


def test_measured_cost_of_a_request_is_paid_by_each_request_of_a_pass() -> None:
    costs = PassCosts(request_seconds=0.25)
    engine = Engine("engine-0", costs, SimulateConfig(admission_reserve_tokens=0), None)
    submit(engine, 0, 4, 200)
    assert engine.stall == pytest.approx(1.0 + 4 * 0.25)


def test_requests_that_arrive_during_a_prefill_pass_share_the_next_one() -> None:
    engine = Engine("engine-0", PassCosts(), SimulateConfig(admission_reserve_tokens=0), None)
    submit(engine, 0, 2, 100)
    engine.advance(0.5)
    submit(engine, 2, 1, 100)
    submit(engine, 3, 1, 100)
    assert engine.stall == pytest.approx(0.5 + 1.0)
    engine.advance(1.75)
    submit(engine, 4, 1, 100)
    assert engine.stall == pytest.approx(0.25 + 1.0)


def test_weight_update_that_discards_the_cache_prefills_in_passes() -> None:
    engine = Engine("engine-0", PassCosts(), SimulateConfig(admission_reserve_tokens=0), None)
    submit(engine, 0, 10, 5000)
    engine.advance(7.0)  # 50,000 tokens are 7 passes.
    assert engine.stall == 0
    engine.pause(recompute=True)
    assert engine.stall == pytest.approx(7.0)

"""Tests of the measurement of an engine: its arithmetic exactly, and the whole procedure on the
simulated engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.simulate.engine_costs import fit_engine_costs
from megatron_async.simulate.profile_engine import (
    Arrival,
    Load,
    decode_seconds,
    profile,
    profile_command,
    request_seconds,
)


def stream(began: float, step: float, tokens: int, chunk: int = 4) -> list[Arrival]:
    """Return the chunks of a request whose first token would arrive at time `began`."""
    counts = range(chunk, tokens + 1, chunk)
    return [Arrival(began + step * (count - 1), count) for count in counts]


def test_decode_seconds_measures_steps_while_all_requests_run() -> None:
    together = [stream(1.0, 0.01, 64), stream(1.2, 0.01, 64), stream(1.1, 0.01, 64)]
    seconds, middle = decode_seconds(together)
    assert seconds == pytest.approx(0.01)
    assert 20 < middle < 50


def test_decode_seconds_raises_when_requests_never_ran_together() -> None:
    with pytest.raises(ComponentFailure, match="--new-tokens"):
        decode_seconds([stream(0.0, 0.01, 16), stream(9.0, 0.01, 16)])


def load(tokens: int, mean: int, *, per_request: float, step: float, per_kv: float) -> Load:
    """Return the measurement that 40 clients of an engine with known costs would give."""
    kv_tokens = 40.0 * (16 + mean)
    seconds = 100 * per_request + tokens / 40 * (step + per_kv * kv_tokens)
    return Load(40, seconds, 100, tokens, kv_tokens)


def test_request_seconds_separates_request_costs_from_token_costs() -> None:
    known = {"per_request": 0.25, "step": 0.08, "per_kv": 1e-5}
    short, long = load(700, 7, **known), load(1900, 19, **known)
    assert request_seconds(short, long, 1e-5) == pytest.approx(0.25)
    assert short.step_seconds(0.25, 1e-5) == pytest.approx(0.08)
    assert long.step_seconds(0.25, 1e-5) == pytest.approx(0.08)


def test_request_and_step_seconds_are_never_negative() -> None:
    short, long = Load(40, 1.0, 100, 100, 0.0), Load(40, 3.0, 100, 200, 0.0)
    assert request_seconds(short, long, 0.0) == 0.0
    assert short.step_seconds(1.0, 0.0) == 0.0


def test_profile_measures_the_whole_cost_model_of_an_engine() -> None:
    model = SimulatedEngineModel(
        step_seconds=0.002, seconds_per_request=0.0005, stream_interval=4, kv_capacity_tokens=9000
    )

    async def measure() -> dict[str, object]:
        engine = SimulatedEngine(model=model)
        try:
            return await profile(engine, [1, 8], [16], 32)
        finally:
            await engine.close()

    data = asyncio.run(measure())
    costs = fit_engine_costs(data)
    assert costs.kv_capacity_tokens == 9000
    assert costs.batches == (1, 8)
    for batch, row in zip((1, 8), data["decode"], strict=True):  # type: ignore[call-overload]
        assert row["seconds"] > 0
        assert row["batch"] == batch
        assert batch * 17 <= row["kv_tokens"] <= batch * 48


@pytest.mark.parametrize("text", ["", "0,1", "a"])
def test_profile_engine_names_an_invalid_option(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="--batches"):
        profile_command("http://127.0.0.1:1", tmp_path / "x.yaml", text, "16", 32, "")


def test_profile_engine_fails_when_engine_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(ComponentFailure, match="profile-engine"):
        profile_command("http://127.0.0.1:1", tmp_path / "x.yaml", "1", "16", 32, "")
    assert not (tmp_path / "x.yaml").exists()

"""Measuring an engine: the arithmetic exactly, the procedure on the simulated engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_async.errors import ComponentFailure, UserError
from megatron_async.rollout.simulated_engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.simulate.engine_costs import fit_engine_costs
from megatron_async.simulate.profile_engine import (
    Arrival,
    decode_seconds,
    profile,
    profile_command,
    seconds_per_request,
)


def stream(began: float, step: float, tokens: int, chunk: int = 4) -> list[Arrival]:
    """A request whose first token came at `began`."""
    counts = range(chunk, tokens + 1, chunk)
    return [Arrival(began + step * (count - 1), count) for count in counts]


def test_decode_time_is_per_step_while_all_run() -> None:
    together = [stream(1.0, 0.01, 64), stream(1.2, 0.01, 64), stream(1.1, 0.01, 64)]
    seconds, middle = decode_seconds(together)
    assert seconds == pytest.approx(0.01)
    assert 20 < middle < 50


def test_time_before_the_last_request_started_does_not_count() -> None:
    alone = [Arrival(0.001 * n, n) for n in range(1, 33)]
    crowded = [Arrival(0.032 + 0.01 * n, 32 + n) for n in range(1, 33)]
    late = [Arrival(0.032 + 0.01 * n, n) for n in range(1, 40)]
    assert decode_seconds([alone + crowded, late])[0] == pytest.approx(0.01)


def test_requests_that_never_ran_together_are_refused() -> None:
    with pytest.raises(ComponentFailure, match="--new-tokens"):
        decode_seconds([stream(0.0, 0.01, 16), stream(9.0, 0.01, 16)])


def test_what_goes_with_requests_is_told_from_what_goes_with_tokens() -> None:
    def run(tokens: int) -> tuple[float, int]:
        return 40 * 0.25 + tokens * 0.002, tokens

    assert seconds_per_request(run(700), run(1900), 40) == pytest.approx(0.25)
    assert seconds_per_request((1.0, 100), (3.0, 200), 40) == 0.0


def test_the_whole_cost_model_of_an_engine() -> None:
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
    # sleeping never takes less than asked for; how much more depends on the machine
    for batch, row in zip((1, 8), data["decode"], strict=True):  # type: ignore[call-overload]
        assert row["seconds"] >= 0.95 * (0.002 + 0.0005 * batch)
        assert row["batch"] == batch
        assert batch * 17 <= row["kv_tokens"] <= batch * 48


@pytest.mark.parametrize("text", ["", "0,1", "a"])
def test_bad_options_are_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="--batches"):
        profile_command("http://127.0.0.1:1", tmp_path / "x.yaml", text, "16", 32, "")


def test_an_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ComponentFailure, match="profile-engine"):
        profile_command("http://127.0.0.1:1", tmp_path / "x.yaml", "1", "16", 32, "")
    assert not (tmp_path / "x.yaml").exists()

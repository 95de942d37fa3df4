"""Hundreds of streams through Ray actors: each token in the store, once, in its own trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.streams import Relays, Run, measure, settings, stub_engines

pytestmark = pytest.mark.slow


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[list[Any]]:
    """Two processes that read streams."""
    ray = pytest.importorskip("ray")
    from megatron_async.launcher.rollout_side import make_ray_token

    make_ray_token(tmp_path / "ray-token")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield [ray.remote(num_cpus=0)(Relays).remote() for _ in range(2)]
    ray.shutdown()


def test_every_token_of_256_streams_arrives_in_order_over_two_versions(
    tmp_path: Path, actors: list[Any]
) -> None:
    """Aborted and resumed once. `measure` compares each token with what its engine must report."""
    with stub_engines(engines=3, processes=1, interval=16, rate=80) as urls:
        run = Run(settings(256, 3, 16), urls, actors, tmp_path)
        figures = asyncio.run(asyncio.wait_for(measure(run, 256, seconds=1), 120))
    assert figures.trajectories == 256
    assert figures.found == figures.reported > 256 * 17
    assert figures.warnings == {}
    # CPU time of the loop's thread, so that a busy machine adds nothing.
    assert max(phase.loop_cpu for phase in figures.phases.values()) < 0.5

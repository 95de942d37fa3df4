"""Hundreds of streams through hosts of engines: each token stored, once, in its own trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.streams import Relays, Run, measure, settings, stub_engines
from megatron_async.places.local import local_place
from megatron_async.places.place import Placed

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Placed]]:
    """Two processes that read streams."""
    with local_place(tmp_path) as place:
        yield [place.start(Relays, name=f"host{i}") for i in range(2)]


def test_every_token_of_256_streams_arrives_in_order_over_two_versions(
    tmp_path: Path, hosts: list[Placed]
) -> None:
    """Aborted and resumed once. `measure` compares each token with what its engine must report."""
    with stub_engines(engines=3, processes=1, interval=16, rate=80) as urls:
        run = Run(settings(256, 3, 16), urls, hosts, tmp_path)
        figures = asyncio.run(asyncio.wait_for(measure(run, 256, seconds=1), 120))
    assert figures.trajectories == 256
    assert figures.found == figures.reported > 256 * 17
    assert figures.warnings == {}
    # CPU time of the loop's thread, so that a busy machine adds nothing.
    assert max(phase.loop_cpu for phase in figures.phases.values()) < 0.5

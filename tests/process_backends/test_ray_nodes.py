"""Tests that an object started with `here` stays on its starter's node, even if Ray restarts it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.process_backends.backend import RemoteObjectLost

NODES, RESTARTS = 3, 3


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """Start a Ray cluster of three nodes; return its backend and the ID of this process's node."""
    import ray
    from ray.cluster_utils import Cluster

    from megatron_async.process_backends.on_ray import RayBackend
    from megatron_async.process_backends.ray_cluster import make_ray_token

    make_ray_token(tmp_path / "ray-token")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=1)
        yield RayBackend.joined(cluster.address), ray.get_runtime_context().get_node_id()
    finally:
        ray.shutdown()
        cluster.shutdown()


class Manager:
    async def where(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def die(self) -> None:
        os._exit(1)


@pytest.mark.slow
def test_object_is_restarted_on_its_starters_node_when_it_dies(nodes: tuple[Any, str]) -> None:
    backend, node = nodes
    manager = backend.start(Manager, name="manager", restarts=RESTARTS, here=True)
    deadline = time.monotonic() + 120
    found: list[str] = []
    while len(found) <= RESTARTS:
        assert time.monotonic() < deadline
        try:
            found.append(manager.call_blocking(lambda one: one.where(), limit=60))
            manager.call_blocking(lambda one: one.die(), limit=60)
        except RemoteObjectLost:
            time.sleep(0.2)  # Ray is restarting the object.
    assert found == [node] * (RESTARTS + 1)

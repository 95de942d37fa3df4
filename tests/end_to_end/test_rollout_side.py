"""The rollout manager stays on the node of whoever holds it, also when Ray starts it again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.launcher import rollout_side
from megatron_async.run_directory import RunDirectory

NODES, RESTARTS = 3, 3


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[str]:
    """A Ray cluster of three nodes; this process is on the first. Gives the first one's id."""
    import ray
    from ray.cluster_utils import Cluster

    rollout_side.make_ray_token(tmp_path / "ray-token")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, namespace=rollout_side.NAMESPACE, log_to_driver=False)
        yield ray.get_runtime_context().get_node_id()
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_manager_that_dies_comes_back_on_the_node_of_its_store(
    nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.exceptions import RayActorError

    @ray.remote(num_cpus=0)
    class Manager:
        def __init__(self, *_: Any) -> None:
            pass

        def start(self) -> None:
            pass

        def where(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

        def die(self) -> None:
            os._exit(1)

    monkeypatch.setattr(rollout_side, "ManagerActor", Manager)
    config = build_config({"engines": {"max_manager_restarts": RESTARTS}})
    side = rollout_side.RolloutSide(config, RunDirectory(tmp_path))
    side.start()
    deadline = time.monotonic() + 120
    found: list[str] = []
    while len(found) <= RESTARTS:
        assert time.monotonic() < deadline
        try:
            found.append(ray.get(side._manager.where.remote(), timeout=60))
            side._manager.die.remote()
            time.sleep(0.5)
        except RayActorError:
            time.sleep(0.2)  # it is being started again
    assert found == [nodes] * (RESTARTS + 1)

"""Every engine has GPUs of its own, for all that the shipped configurations ask; no GPU is there.

A place counts the GPUs that it is given; what an engine's server would see is the environment of
its host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, load_config
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.host import HostedEngines
from megatron_async.files.package_files import ROOT
from megatron_async.launcher.devices import split_devices
from megatron_async.places.local import local_place
from megatron_async.weight_sync.gpu_sharing import gpus_of

GPUS = [str(index) for index in range(8)]
NAMES = sorted(
    path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.endswith("_base")
)


class Host:
    """An engine's host that starts nothing; its arguments are those of `EngineHost`."""

    def __init__(self, *arguments: Any) -> None:
        self._tensor = EngineConfig.model_validate_json(arguments[2]).tensor
        self._shared_index: int | None = arguments[5]

    async def start(self) -> str:
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        if self._shared_index is None:
            return visible
        return ",".join(gpus_of(self._shared_index, self._tensor, visible))


def placed(config: RunConfig, engines: int, folder: Path) -> list[list[str]]:
    """The GPUs that each of so many engines sees, all there at once."""
    settings = config.engines.model_copy(update={"device": "cuda"})
    config = config.model_copy(update={"engines": settings})
    with local_place(folder, gpus=",".join(GPUS)) as place:
        launcher = HostedEngines(config, folder, place, Host)  # type: ignore[arg-type]
        hosts = [launcher._start_host(index, f"engine{index}") for index in range(engines)]
        seen = [host.ask(lambda one: one.start(), limit=120) for host in hosts]
    return [gpus.split(",") for gpus in seen]


def arrangement(config: RunConfig) -> tuple[int, int, str]:
    """All that decides which GPUs an engine gets: engines on one node, GPUs of each, placement."""
    engines = config.engines
    return min(engines.count, len(GPUS) // engines.tensor), engines.tensor, engines.placement


@pytest.mark.slow
def test_engines_of_a_node_share_no_gpu(tmp_path: Path) -> None:
    """Of a run over several nodes: as many engines as one node takes. Each arrangement once."""
    configs = [load_config(ROOT / "configs" / f"{name}.yaml") for name in NAMES]
    arrangements = {arrangement(config): config for config in configs}
    assert {placement for *_, placement in arrangements} == {"colocated", "disaggregated"}
    for index, ((engines, tensor, _), config) in enumerate(arrangements.items()):
        assert engines >= 1
        folder = tmp_path / str(index)
        folder.mkdir()
        seen = placed(config, engines, folder)
        assert all(len(gpus) == tensor for gpus in seen), config.name
        every = [gpu for gpus in seen for gpu in gpus]
        assert len(set(every)) == len(every) and set(every) <= set(GPUS), config.name


@pytest.mark.parametrize("name", NAMES)
def test_trainers_and_engines_of_one_node_share_no_gpu_unless_they_are_meant_to(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    if config.parallel.nodes > 1 or name.endswith("nodes"):
        return  # trainers have nodes of their own: nothing is split
    split = split_devices(GPUS, config)
    if config.engines.placement == "colocated":
        assert (split.trainers, split.engines) == (None, None)
        return
    assert split.trainers is not None and split.engines is not None
    trainers, engines = split.trainers.split(","), split.engines.split(",")
    assert len(trainers) == config.parallel.ranks
    assert len(engines) == config.engines.count * config.engines.tensor
    assert not set(trainers) & set(engines)

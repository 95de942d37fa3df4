"""GPUs of one machine: those of the trainer and those of the engines are not the same ones.

No GPU is needed: a place counts the GPUs that it is given, and the environment of an engine's host
shows which of them its server would see.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_async import cli
from megatron_async.config import RunConfig, build_config, load_config
from megatron_async.engines.host import HostedEngines
from megatron_async.errors import UserError
from megatron_async.files.package_files import ROOT
from megatron_async.launcher.devices import (
    DeviceSplit,
    check_ray,
    split_devices,
    split_of_this_machine,
)
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.process_backends.local import local_backend
from megatron_async.weight_sync.gpu_sharing import gpus_of

EIGHT = [str(index) for index in range(8)]


def settings(
    ranks: int,
    count: int,
    tensor: int = 1,
    transport: str = "distributed",
    pipeline: int = 1,
    **engines: Any,
) -> RunConfig:
    return build_config(
        {
            "parallel": {"ranks": ranks, "tensor": ranks // pipeline, "pipeline": pipeline},
            "engines": {"count": count, "tensor": tensor, **engines},
            "weights": {"transport": transport, "verify": "never"},
        }
    )


@pytest.mark.parametrize(
    ("gpus", "config", "split"),
    [
        (EIGHT, settings(2, 2, tensor=2), DeviceSplit("0,1", "2,3,4,5")),
        (["3", "GPU-b", "7"], settings(1, 2), DeviceSplit("3", "GPU-b,7")),
        (["0"], settings(1, 1, transport="disk"), DeviceSplit()),
        (["0"], settings(1, 1, transport="tensor", placement="colocated"), DeviceSplit()),
        (EIGHT, settings(8, 4, 2, transport="tensor", placement="colocated"), DeviceSplit()),
        (
            EIGHT,
            settings(8, 8, transport="tensor", placement="colocated", pipeline=4),
            DeviceSplit(),
        ),
    ],
    ids=["more than needed", "as named", "one for both", "in turns", "all in turns", "by stage"],
)
def test_ranks_first_then_engines(gpus: list[str], config: RunConfig, split: DeviceSplit) -> None:
    assert split_devices(gpus, config) == split


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            settings(2, 2),
            r"parallel.ranks 2 and .* 2 need 4 GPUs .* distributed; this machine has 3",
        ),
        (
            settings(1, 1, transport="tensor"),
            "weights.transport is tensor, .* on the same GPU",
        ),
        (
            settings(4, 1, transport="tensor", placement="colocated"),
            "parallel.ranks 4 on parallel.nodes 1 needs 4 GPUs per node, .* this machine has 3",
        ),
        (settings(4, 1, transport="disk"), "parallel.ranks 4 .* this machine has 3"),
    ],
    ids=[
        "NCCL needs a device for each rank",
        "an engine does not see that GPU",
        "ranks that share with an engine need theirs",
        "so do those that meet engines on them",
    ],
)
def test_what_cannot_work_on_these_gpus_is_refused(config: RunConfig, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        split_devices(["0", "1", "2"], config)


def test_what_shares_its_devices_or_needs_none_is_not_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    gpu = {"device": "cuda"}
    assert split_of_this_machine(settings(2, 2, **gpu)) == DeviceSplit("0,1", "2,3")
    assert split_of_this_machine(settings(2, 2, device="cpu")) == DeviceSplit()
    shared = settings(2, 1, transport="tensor", placement="colocated", **gpu)
    assert split_of_this_machine(shared) == DeviceSplit()
    no_model = settings(2, 2, transport="tensor", kind="simulated", **gpu)
    assert split_of_this_machine(no_model) == DeviceSplit()


def test_a_ray_cluster_that_runs_hands_out_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many it has is unknown here; what no GPUs can do is refused."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert split_of_this_machine(settings(2, 2, device="cuda")) == DeviceSplit()
    with pytest.raises(UserError, match=r"weights\.transport is tensor"):
        split_of_this_machine(settings(1, 1, transport="tensor", device="cuda"))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A run that every machine without GPUs can start."""
    build_tiny_model(tmp_path / "model", seed=1)
    path = tmp_path / "c.yaml"
    path.write_text(f"name: it\nroot: {tmp_path}/runs\nmodel: {{path: {tmp_path}/model}}\n")
    return path


GPUS_TOO_FEW = ["engines.device=cuda"]


def test_what_the_gpus_cannot_do_is_refused_before_a_run_directory_is_made(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"need 2 GPUs with weights\.transport distributed"):
        cli.train(GPUS_TOO_FEW, config_file)
    with pytest.raises(UserError, match=r"need 2 GPUs with weights\.transport distributed"):
        cli.quickstart(GPUS_TOO_FEW, config_file)
    assert not (config_file.parent / "runs").exists()


def test_a_trainer_with_fewer_gpus_than_ranks_is_refused_whatever_the_engines_use(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    wanted = ["parallel.ranks=2", "parallel.tensor=2", "engines.device=cpu"]
    refusal = "parallel.ranks 2 on parallel.nodes 1 needs 2 GPUs .* this machine has 1"
    with pytest.raises(UserError, match=refusal):
        cli.train(wanted, config_file)
    with pytest.raises(UserError, match=refusal):
        cli.sft(wanted, config_file, config_file.parent / "tuned")
    assert not (config_file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "address", "refusal"),
    [
        ({"cluster": "ray"}, "", "cluster is ray, which requires Ray"),
        ({}, "127.0.0.1:1", "cluster is auto, which requires Ray"),
        ({"cluster": "local"}, "127.0.0.1:1", None),
        ({}, "", None),
    ],
)
def test_ray_is_needed_only_where_it_is_used(
    settings: dict[str, str], address: str, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = build_config(settings)
    if refusal is None:
        assert split_of_this_machine(config) == DeviceSplit()
    else:
        with pytest.raises(UserError, match=refusal):
            split_of_this_machine(config)


def test_several_nodes_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"2 nodes are used, which .*megatron_async\[cluster\]"):
        check_ray(build_config({}), nodes=2)


GPUS = [str(index) for index in range(8)]
NAMES = sorted(
    path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.endswith("_base")
)


class Host:
    """An engine's host that starts nothing; its arguments are those of `EngineHost`."""

    def __init__(
        self, _engine_id: str, config: RunConfig, _log: Path, shared_index: int | None
    ) -> None:
        self._tensor = config.engines.tensor
        self._shared_index = shared_index

    async def start(self) -> str:
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        if self._shared_index is None:
            return visible
        return ",".join(gpus_of(self._shared_index, self._tensor, visible))


def remote(config: RunConfig, engines: int, folder: Path) -> list[list[str]]:
    """The GPUs that each of so many engines sees, all there at once."""
    settings = config.engines.model_copy(update={"device": "cuda"})
    config = config.model_copy(update={"engines": settings})
    with local_backend(folder, gpus=",".join(GPUS)) as backend:
        launcher = HostedEngines(config, folder, backend, Host)  # type: ignore[arg-type]
        hosts = [launcher._start_host(index, f"engine{index}") for index in range(engines)]
        seen = [host.call_blocking(lambda one: one.start(), limit=120) for host in hosts]
    return [gpus.split(",") for gpus in seen]


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_engines_of_a_node_share_no_gpu(placement: str, tmp_path: Path) -> None:
    config = settings(8, 3, tensor=2, transport="tensor", placement=placement)
    seen = remote(config, 3, tmp_path)
    assert [len(gpus) for gpus in seen] == [2, 2, 2]
    every = [gpu for gpus in seen for gpu in gpus]
    assert len(set(every)) == len(every) and set(every) <= set(GPUS)


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

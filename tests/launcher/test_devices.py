"""Tests how the GPUs of one machine are divided between the trainer and the engines, so that they
share none.

The tests need no GPU: a process backend counts the GPU names that it receives, and the environment
of an engine's host shows which of them its server would see.
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
    ids=["8 GPUs", "UUIDs", "1 GPU", "colocated", "colocated on 8", "colocated by stage"],
)
def test_split_devices_gives_ranks_the_first_gpus_and_engines_the_next(
    gpus: list[str], config: RunConfig, split: DeviceSplit
) -> None:
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
        "distributed transport needs a GPU for each rank",
        "tensor transport needs a shared GPU",
        "colocated ranks need a GPU each",
        "ranks need a GPU each with disk transport",
    ],
)
def test_split_devices_refuses_runs_that_three_gpus_cannot_serve(
    config: RunConfig, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        split_devices(["0", "1", "2"], config)


def test_gpus_are_not_split_when_shared_or_unused_by_engines(
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


def test_gpus_are_not_split_when_a_ray_cluster_assigns_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of GPUs of the cluster is unknown here, but settings that no number of GPUs can
    serve are refused."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert split_of_this_machine(settings(2, 2, device="cuda")) == DeviceSplit()
    with pytest.raises(UserError, match=r"weights\.transport is tensor"):
        split_of_this_machine(settings(1, 1, transport="tensor", device="cuda"))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Return the config file of a run that every machine without GPUs can start."""
    build_tiny_model(tmp_path / "model", seed=1)
    path = tmp_path / "c.yaml"
    path.write_text(f"name: small\nroot: {tmp_path}/runs\nmodel: {{path: {tmp_path}/model}}\n")
    return path


CUDA_ENGINES = ["engines.device=cuda"]


def test_train_creates_no_run_directory_when_gpus_are_too_few(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"need 2 GPUs with weights\.transport distributed"):
        cli.train(CUDA_ENGINES, config_file)
    with pytest.raises(UserError, match=r"need 2 GPUs with weights\.transport distributed"):
        cli.quickstart(CUDA_ENGINES, config_file)
    assert not (config_file.parent / "runs").exists()


def test_commands_refuse_fewer_gpus_than_ranks_when_engines_use_the_cpu(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    overrides = ["parallel.ranks=2", "parallel.tensor=2", "engines.device=cpu"]
    refusal = "parallel.ranks 2 on parallel.nodes 1 needs 2 GPUs .* this machine has 1"
    with pytest.raises(UserError, match=refusal):
        cli.train(overrides, config_file)
    with pytest.raises(UserError, match=refusal):
        cli.sft(overrides, config_file, config_file.parent / "tuned")
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
def test_missing_ray_is_refused_only_when_settings_use_ray(
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


def test_check_ray_refuses_several_nodes_when_ray_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"2 nodes are used, which .*megatron_async\[cluster\]"):
        check_ray(build_config({}), nodes=2)


GPUS = [str(index) for index in range(8)]
NAMES = sorted(
    path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.endswith("_base")
)


class RecordingHost:
    """Stand-in for `EngineHost`, with the same arguments, that starts no server and returns its
    visible GPUs."""

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


def visible_gpus(config: RunConfig, engines: int, folder: Path) -> list[list[str]]:
    """Start the hosts of `engines` engines at the same time and return the GPUs that each of them
    sees."""
    settings = config.engines.model_copy(update={"device": "cuda"})
    config = config.model_copy(update={"engines": settings})
    with local_backend(folder, gpus=",".join(GPUS)) as backend:
        launcher = HostedEngines(config, folder, backend, RecordingHost)  # type: ignore[arg-type]
        hosts = [launcher._start_host(index, f"engine{index}") for index in range(engines)]
        seen = [host.call_blocking(lambda host: host.start(), limit=120) for host in hosts]
    return [gpus.split(",") for gpus in seen]


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_engines_of_a_node_see_disjoint_gpus(placement: str, tmp_path: Path) -> None:
    config = settings(8, 3, tensor=2, transport="tensor", placement=placement)
    seen = visible_gpus(config, 3, tmp_path)
    assert [len(gpus) for gpus in seen] == [2, 2, 2]
    all_gpus = [gpu for gpus in seen for gpu in gpus]
    assert len(set(all_gpus)) == len(all_gpus) and set(all_gpus) <= set(GPUS)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_config_gives_trainers_and_engines_disjoint_gpus(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    if config.parallel.nodes > 1 or name.endswith("nodes"):
        return  # Trainers have separate nodes, so GPUs are not split.
    split = split_devices(GPUS, config)
    if config.engines.placement == "colocated":
        assert (split.trainers, split.engines) == (None, None)
        return
    assert split.trainers is not None and split.engines is not None
    trainers, engines = split.trainers.split(","), split.engines.split(",")
    assert len(trainers) == config.parallel.ranks
    assert len(engines) == config.engines.count * config.engines.tensor
    assert not set(trainers) & set(engines)

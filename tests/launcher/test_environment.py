"""What trainer ranks get in their environment, however they are started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.commands import sft
from megatron_async.config import RunConfig, build_config
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.nodes import communication_environment
from megatron_async.engines.sglang.process import server_environment
from megatron_async.launcher import node, rank_job, supervisor
from megatron_async.launcher.environment import allocator_notices, trainer_environment
from megatron_async.run_directory import RunDirectory

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def test_what_the_user_has_set_wins() -> None:
    base = {"OMP_NUM_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "8", ALLOCATOR: "backend:native"}
    assert set(base) & set(trainer_environment(base, one_machine=True)) == set()
    assert set(base) <= set(trainer_environment({}, one_machine=True))


def test_a_restart_in_place_cannot_be_switched_off() -> None:
    assert trainer_environment({OWN_STORE: "0"}, one_machine=True)[OWN_STORE] == "1"


def test_the_users_newer_allocator_variable_replaces_the_default_too() -> None:
    base = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert ALLOCATOR not in trainer_environment(base, one_machine=True)


@pytest.mark.parametrize("variable", [ALLOCATOR, "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_switched_off_in_both_roles_when_they_share_gpus(
    variable: str,
) -> None:
    config = build_config(
        {
            "engines": {"placement": "colocated"},
            "schedule": {"preset": "sync"},
            "weights": {"transport": "tensor"},
        }
    )
    given, changed = "max_split_size_mb:64,expandable_segments:True", "expandable_segments:False"
    base = {variable: given}
    trainer = trainer_environment(base, one_machine=True, hands_memory_to_engines=True)
    engine = server_environment(config.engines, "cuda", ["0"], base)
    assert trainer[variable] == engine[variable] == f"max_split_size_mb:64,{changed}"
    assert server_environment(EngineConfig(), "cuda", ["0"], base)[variable] == given
    [notice] = allocator_notices(config, "cuda", base)
    assert notice.startswith(f"{variable} is {given!r}; engines.placement colocated")
    assert allocator_notices(config, "cpu", base) == ()
    assert allocator_notices(config, "cuda", {variable: changed}) == ()


# ------------------------------------------------------------ however a run is started


class Started(Exception):
    """A process would have been started with this environment on top of the starter's."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self.environment = environment


def on_one_machine(config: RunConfig, directory: RunDirectory) -> None:
    supervisor.trainers(config, directory, "a:1", None)


def on_several_nodes(config: RunConfig, directory: RunDirectory) -> None:
    """By hand and under Slurm: both start this role on each node."""
    here: Any = SimpleNamespace(
        config=config,
        directory=directory,
        session=SimpleNamespace(stop_file=directory.path / "stop"),
        index=0,
        count=1,
        address="a",
    )
    node._ranks(here, "a:1")


def by_fine_tuning(config: RunConfig, directory: RunDirectory) -> None:
    sft.run_sft(config, directory, directory.path / "out")


def as_ray_node(config: RunConfig, directory: RunDirectory) -> None:
    """Manager and engines inherit it."""
    here: Any = SimpleNamespace(
        config=config,
        directory=directory,
        session=SimpleNamespace(path=directory.path),
        address="a",
        name="a",
    )
    with node.Node.ray_node(here, "--address=a:1"):
        raise AssertionError("nothing is started here")


Start = Callable[[RunConfig, RunDirectory], None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Mapping[str, str]]:
    """What a process gets that is started this way, from a shell that has set nothing."""

    def torchrun(*_: Any, environment: Mapping[str, str], **__: Any) -> None:
        raise Started(environment)

    def child(_command: Any, env: Mapping[str, str], **_: Any) -> None:
        raise Started(env)

    for module in (node, supervisor, rank_job):
        monkeypatch.setattr(module, "torchrun", torchrun)
    monkeypatch.setattr(node, "ChildProcess", child)
    for name in tuple(os.environ):
        if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL", "CUDA_", "PYTORCH_", "RAY_ADDRESS")):
            monkeypatch.delenv(name)

    def start(how: Start, **sections: Any) -> Mapping[str, str]:
        with pytest.raises(Started) as found:
            how(build_config(sections), RunDirectory(tmp_path))
        return found.value.environment

    return start


@pytest.mark.parametrize(
    ("how", "one_machine"),
    [(on_one_machine, True), (on_several_nodes, False), (by_fine_tuning, True)],
)
def test_trainer_ranks_have_it_however_they_are_started(
    started: Callable[..., Mapping[str, str]], how: Start, one_machine: bool
) -> None:
    found = started(how)
    shared = communication_environment({}, one_machine=one_machine, nvls=True)
    assert {name: found[name] for name in shared} == shared
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert found[ALLOCATOR] == "expandable_segments:True"


def test_manager_and_engines_of_a_ray_node_have_what_they_share_with_the_ranks(
    started: Callable[..., Mapping[str, str]],
) -> None:
    found = started(as_ray_node)
    shared = communication_environment({}, one_machine=False, nvls=True)
    assert {name: found[name] for name in shared} == shared


@pytest.mark.parametrize("how", [on_one_machine, on_several_nodes])
def test_no_way_of_starting_puts_memory_that_engines_open_into_expandable_segments(
    started: Callable[..., Mapping[str, str]], how: Start
) -> None:
    assert ALLOCATOR not in started(how, weights={"transport": "tensor"})

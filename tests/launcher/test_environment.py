"""Tests the environment variables that trainer ranks, managers and engines get with each method of
starting a run."""

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
SEPARATE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def test_trainer_environment_keeps_variables_that_the_user_has_set() -> None:
    base = {"OMP_NUM_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "8", ALLOCATOR: "backend:native"}
    assert set(base) & set(trainer_environment(base, one_machine=True)) == set()
    assert set(base) <= set(trainer_environment({}, one_machine=True))


def test_trainer_environment_overrides_the_variable_that_restarts_need() -> None:
    assert trainer_environment({SEPARATE_STORE: "0"}, one_machine=True)[SEPARATE_STORE] == "1"


def test_default_allocator_variable_is_omitted_when_the_newer_one_is_set() -> None:
    base = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert ALLOCATOR not in trainer_environment(base, one_machine=True)


@pytest.mark.parametrize("variable", [ALLOCATOR, "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_off_in_both_roles_when_colocated(
    variable: str,
) -> None:
    config = build_config(
        {
            "engines": {"placement": "colocated"},
            "schedule": {"preset": "sync"},
            "weights": {"transport": "tensor"},
        }
    )
    original, changed = "max_split_size_mb:64,expandable_segments:True", "expandable_segments:False"
    base = {variable: original}
    trainer = trainer_environment(base, one_machine=True, hands_memory_to_engines=True)
    engine = server_environment(config.engines, "cuda", ["0"], base)
    assert trainer[variable] == engine[variable] == f"max_split_size_mb:64,{changed}"
    assert server_environment(EngineConfig(), "cuda", ["0"], base)[variable] == original
    [notice] = allocator_notices(config, "cuda", base)
    assert notice.startswith(f"{variable} is {original!r}; engines.placement colocated")
    assert allocator_notices(config, "cpu", base) == ()
    assert allocator_notices(config, "cuda", {variable: changed}) == ()


# ------------------------------------------------------------ all launch methods


class Started(Exception):
    """Raised instead of starting a process; contains the variables that would be added to the
    caller's environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self.environment = environment


def on_one_machine(config: RunConfig, directory: RunDirectory) -> None:
    supervisor.trainers(config, directory, "a:1", None)


def on_several_nodes(config: RunConfig, directory: RunDirectory) -> None:
    """Start the trainer ranks of one node; manual commands and Slurm both start this role on each
    node."""
    this_node: Any = SimpleNamespace(
        config=config,
        directory=directory,
        session=SimpleNamespace(stop_file=directory.path / "stop"),
        index=0,
        count=1,
        address="a",
    )
    node._ranks(this_node, "a:1")


def by_fine_tuning(config: RunConfig, directory: RunDirectory) -> None:
    sft.run_sft(config, directory, directory.path / "out")


def as_ray_node(config: RunConfig, directory: RunDirectory) -> None:
    """Start Ray on a node; the manager and the engines inherit its environment."""
    this_node: Any = SimpleNamespace(
        config=config,
        directory=directory,
        session=SimpleNamespace(path=directory.path),
        address="a",
        name="a",
    )
    with node.Node.ray_node(this_node, "--address=a:1"):
        raise AssertionError("no process may be started")


LaunchMethod = Callable[[RunConfig, RunDirectory], None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Mapping[str, str]]:
    """Return a function that starts a run by a given launch method, from a shell that has set no
    variable, and returns the environment of the started process."""

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

    def start(method: LaunchMethod, **sections: Any) -> Mapping[str, str]:
        with pytest.raises(Started) as found:
            method(build_config(sections), RunDirectory(tmp_path))
        return found.value.environment

    return start


@pytest.mark.parametrize(
    ("method", "one_machine"),
    [(on_one_machine, True), (on_several_nodes, False), (by_fine_tuning, True)],
)
def test_trainer_ranks_get_the_variables_with_each_launch_method(
    started: Callable[..., Mapping[str, str]], method: LaunchMethod, one_machine: bool
) -> None:
    found = started(method)
    shared = communication_environment({}, one_machine=one_machine, nvls=True)
    assert {name: found[name] for name in shared} == shared
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert found[ALLOCATOR] == "expandable_segments:True"


def test_ray_node_gets_the_communication_variables_of_the_ranks(
    started: Callable[..., Mapping[str, str]],
) -> None:
    found = started(as_ray_node)
    shared = communication_environment({}, one_machine=False, nvls=True)
    assert {name: found[name] for name in shared} == shared


@pytest.mark.parametrize("method", [on_one_machine, on_several_nodes])
def test_allocator_variable_is_unset_when_engines_open_trainer_memory(
    started: Callable[..., Mapping[str, str]], method: LaunchMethod
) -> None:
    assert ALLOCATOR not in started(method, weights={"transport": "tensor"})

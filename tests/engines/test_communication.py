"""Tests that trainer ranks and engines have the same NCCL settings for moving weights
between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.nodes import INTERFACE_VARIABLE, communication_environment, interface_of
from megatron_async.engines.sglang.process import server_environment
from megatron_async.engines.sglang.weight_updater import join
from megatron_async.launcher.environment import ray_node_environment, trainer_environment

NCCL_CHOICES = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
LOOPBACK = interface_of("127.0.0.1")


def shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("NCCL_") or name == "GLOO_SOCKET_IFNAME"
    }


# NCCL's value 2 means "if the hardware supports it"; 1 would require it.
ON, OFF = "2", "0"


@pytest.mark.parametrize("inherited", [{}, {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}])
def test_all_roles_have_equal_nccl_settings_on_one_machine(inherited: dict[str, str]) -> None:
    trainer = shared({**inherited, **trainer_environment(inherited, one_machine=True)})
    engine = shared(server_environment(EngineConfig(), "cuda", ["0"], inherited))
    assert trainer == engine
    expected = {"NCCL_CUMEM_ENABLE": OFF, "NCCL_NVLS_ENABLE": ON} | inherited
    assert {name: trainer[name] for name in NCCL_CHOICES} == expected
    assert trainer["GLOO_SOCKET_IFNAME"] == trainer["NCCL_SOCKET_IFNAME"] == LOOPBACK


@pytest.mark.parametrize("nvls", [True, False])
def test_all_roles_have_equal_nccl_settings_on_several_nodes(nvls: bool) -> None:
    """The engines on a Ray node inherit the environment of the node."""
    engines = EngineConfig(host="node", nvls=nvls)
    trainer = shared(trainer_environment({}, one_machine=False, nvls=engines.uses_nvls))
    node = ray_node_environment({}, nvls=engines.uses_nvls)
    engine = shared(server_environment(engines, "cuda", ["0"], node))
    assert trainer == shared(node) == engine
    assert trainer["NCCL_NVLS_ENABLE"] == (ON if nvls else OFF)


def test_uses_nvls_is_false_by_default_only_when_engines_are_colocated() -> None:
    assert EngineConfig().uses_nvls
    assert not EngineConfig(placement="colocated").uses_nvls
    assert EngineConfig(placement="colocated", nvls=True).uses_nvls


def test_communication_environment_uses_the_interface_that_the_user_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LOOPBACK is not None
    monkeypatch.setenv(INTERFACE_VARIABLE, LOOPBACK)
    found = communication_environment({}, one_machine=False, nvls=True)
    assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"] == LOOPBACK


def test_communication_environment_ignores_the_address_of_the_host_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian gives a machine's own name the address 127.0.1.1, which no other node can reach."""
    monkeypatch.setattr("socket.gethostbyname", lambda _name: "127.0.1.1")
    found = communication_environment({}, one_machine=False, nvls=True).get("GLOO_SOCKET_IFNAME")
    routed = [name for name in psutil.net_if_addrs() if name != LOOPBACK]
    assert found in routed or not routed


def test_communication_environment_sets_no_torch_nccl_variables() -> None:
    found = communication_environment({}, one_machine=True, nvls=True)
    assert not [name for name in found if name.startswith("TORCH_NCCL")]


def test_communication_environment_keeps_variables_that_are_set() -> None:
    inherited = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib1", "NCCL_DEBUG": "INFO"}
    assert not set(inherited) & set(
        communication_environment(inherited, one_machine=True, nvls=True)
    )


EnvironmentAfterSglang = Callable[..., dict[str, str]]


@pytest.fixture(scope="module")
def environment_after_sglang() -> Iterator[EnvironmentAfterSglang]:
    """A function that returns the environment which SGLang makes of an environment; one process
    serves all calls, because of SGLang's imports."""
    pytest.importorskip("sglang")
    command = [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang_environment"]
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(environment: Mapping[str, str], *settings: str) -> dict[str, str]:
            question = {"environment": dict(environment), "settings": settings}
            print(json.dumps(question), file=questions, flush=True)
            found: dict[str, str] = json.loads(answers.readline())
            return found

        yield ask
        process.kill()  # The process needs no cleanup.


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("nvls", [True, False])
def test_sglang_servers_have_the_trainers_nccl_settings(
    nvls: bool, environment_after_sglang: EnvironmentAfterSglang
) -> None:
    """SGLang 0.5.23's own function runs; it turns both settings off if they are not set."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    found = environment_after_sglang(
        server_environment(EngineConfig(nvls=nvls), "cuda", None, base)
    )
    trainer = trainer_environment(base, one_machine=True, nvls=nvls)
    for name in NCCL_CHOICES:
        assert found[name] == trainer[name], name
    if not nvls:
        alone = environment_after_sglang(base)
        assert {name: alone[name] for name in NCCL_CHOICES} == dict.fromkeys(NCCL_CHOICES, OFF)


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("setting", ["enable_nccl_nvls", "enable_symm_mem"])
def test_config_refuses_sglang_arguments_that_change_nccl_only_for_servers(
    setting: str, environment_after_sglang: EnvironmentAfterSglang
) -> None:
    environment = server_environment(EngineConfig(nvls=False), "cuda", None, os.environ)
    changed = environment_after_sglang(environment, setting)
    assert any(changed[name] != environment[name] for name in NCCL_CHOICES)
    with pytest.raises(ValueError, match="hand buffers over otherwise than the trainer"):
        EngineConfig(extra_args=["--" + setting.replace("_", "-")])


def test_join_restores_the_users_variables_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    seen: list[tuple[str, str]] = []

    def original(_updater: Any, group_name: str) -> None:
        names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")
        seen.append((os.environ[names[0]], os.environ[names[1]]))
        raise RuntimeError(group_name)

    with pytest.raises(RuntimeError, match="lost"):
        join(original, None, group_name="lost")
    assert seen == [("2", "1")]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ

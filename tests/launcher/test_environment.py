"""What trainer ranks get in their environment, however they are started."""

from __future__ import annotations

from pathlib import Path

from megatron_async.launcher.environment import trainer_environment

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def test_what_the_user_has_set_wins() -> None:
    base = {"OMP_NUM_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "8", ALLOCATOR: "backend:native"}
    assert set(base) & set(trainer_environment(base, one_machine=True)) == set()
    assert set(base) <= set(trainer_environment({}, one_machine=True))


def test_a_restart_in_place_cannot_be_switched_off() -> None:
    assert trainer_environment({OWN_STORE: "0"}, one_machine=True)[OWN_STORE] == "1"


def test_memory_that_an_engine_opens_is_not_in_expandable_segments() -> None:
    assert trainer_environment({}, one_machine=True)[ALLOCATOR] == "expandable_segments:True"
    assert ALLOCATOR not in trainer_environment({}, one_machine=True, hands_memory_to_engines=True)


def test_only_what_a_run_has_is_named() -> None:
    names = {"MEGATRON_ASYNC_RAY_ADDRESS", "MEGATRON_ASYNC_STOP_FILE", "CUDA_VISIBLE_DEVICES"}
    assert (
        names & set(trainer_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, one_machine=True)) == set()
    )
    added = trainer_environment(
        {}, one_machine=True, ray_address="a:1", stop_file=Path("/run/stop"), gpus="2,3"
    )
    assert {name: added[name] for name in sorted(names)} == {
        "CUDA_VISIBLE_DEVICES": "2,3",
        "MEGATRON_ASYNC_RAY_ADDRESS": "a:1",
        "MEGATRON_ASYNC_STOP_FILE": "/run/stop",
    }

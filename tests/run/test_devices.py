"""GPUs of one machine: those of the trainer and those of the engines are not the same ones."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from megatron_async.config import RunConfig, build_config, load_config
from megatron_async.errors import UserError
from megatron_async.run.devices import DeviceSplit, split_devices, split_of_this_machine
from megatron_async.run.launch import ROOT

EIGHT = [str(index) for index in range(8)]


def settings(
    ranks: int, count: int, tensor: int = 1, transport: str = "distributed", **engines: Any
) -> RunConfig:
    return build_config(
        {
            "parallel": {"ranks": ranks, "tensor": ranks},
            "engines": {"count": count, "tensor": tensor, **engines},
            "weights": {"transport": transport, "verify": "never"},
        }
    )


def test_the_config_of_one_node_uses_each_of_its_gpus_once() -> None:
    config = load_config(ROOT / "configs" / "qwen2.5-7b.yaml")
    assert split_devices(EIGHT, config) == DeviceSplit("0,1,2,3", "4,5,6,7")


@pytest.mark.parametrize(
    ("gpus", "config", "split"),
    [
        (EIGHT, settings(2, 2, tensor=2), DeviceSplit("0,1", "2,3,4,5")),
        (["3", "GPU-b", "7"], settings(1, 2), DeviceSplit("3", "GPU-b,7")),
        (["0"], settings(1, 1, transport="disk"), DeviceSplit()),
        (["0"], settings(1, 1, transport="tensor", placement="colocated"), DeviceSplit()),
    ],
    ids=["more than needed", "as the machine names them", "one for both", "in turns"],
)
def test_ranks_first_then_engines(gpus: list[str], config: RunConfig, split: DeviceSplit) -> None:
    assert split_devices(gpus, config) == split


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (settings(2, 2), r"parallel.ranks 2 and .* 2 need 4 GPUs .* distributed, and there are 3"),
        (settings(1, 1, transport="tensor"), "weights.transport tensor hands weights over on one"),
        (
            settings(2, 2, transport="tensor", placement="colocated"),
            r"one engine on one GPU.* engines.count x engines.tensor is 2",
        ),
    ],
    ids=[
        "NCCL needs a device for each rank",
        "an engine does not see that GPU",
        "nor does another",
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


@pytest.mark.slow
def test_ray_hands_out_the_engines_gpus_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from megatron_async.run.rollout_side import connect_ray

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    connect_ray(None, gpus="2,3")
    try:

        @ray.remote(num_gpus=1)
        def gpu() -> str:
            time.sleep(1.0)  # so that the two calls are there at once
            return os.environ["CUDA_VISIBLE_DEVICES"]

        assert sorted(ray.get([gpu.remote(), gpu.remote()], timeout=60)) == ["2", "3"]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3", "the trainers' process has its own"
    finally:
        ray.shutdown()

"""Tests the comparison of copies that must be equal on several ranks; a difference of one bit stops
the run with the tensor's name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_async.errors import ComponentFailure
from megatron_async.trainer.replicas import Difference, ReplicaCheck, differences
from tests.distributed import run_ranks
from tests.hf_models import save_hf_model
from tests.trainer.cases import ragged_batch, settings, trainer_session


def test_differences_is_empty_when_copies_are_equal() -> None:
    assert (
        differences([[("norm", 0, 5), ("matrix", 0, 7)], [("matrix", 1, 7), ("norm", 1, 5)]]) == []
    )


def test_difference_lists_the_ranks_of_each_version() -> None:
    found = differences([[("norm", r, 5), ("matrix", r, 8 if r == 2 else 7)] for r in range(4)])
    assert found == [Difference("matrix", ((0, 1, 3), (2,)))]


def test_differences_adds_shard_checksums_modulo_2_to_the_64() -> None:
    largest = 2**63 - 1
    for last, rank_groups in ((2, []), (3, [((0, 1), (2, 3))])):
        checksums = zip((0, 0, 2, 2), (largest, largest, -4, last), strict=True)
        found = differences([[("norm", owner, checksum)] for owner, checksum in checksums])
        assert [difference.rank_groups for difference in found] == rank_groups


def test_difference_message_shows_spans_of_ranks() -> None:
    difference = Difference("model.norm.weight", ((0, 1, 2, 5), (3, 4)))
    assert str(difference) == "model.norm.weight (not the same on ranks 0-2, 5 and on ranks 3-4)"


@dataclass(frozen=True)
class Plant:
    """One bit to flip in one rank's copy of a parameter, or in the optimizer's float32 copy of the
    parameter."""

    parameter: str
    rank: int
    message: str
    rank_groups: tuple[tuple[int, ...], ...]
    of_optimizer: bool = False


@dataclass(frozen=True)
class World:
    """A model at a layout of four ranks, and the bits that are flipped in it, one after the
    other."""

    model: str
    changes: dict[str, Any]
    plants: list[Plant] = field(default_factory=list)


_LAYER = "decoder.layers.0."
WORLDS = {
    "tensor x data": World(
        "qwen3",
        {"parallel": {"tensor": 2}},
        [
            Plant(
                f"{_LAYER}self_attention.q_layernorm.weight",
                1,
                "model.layers.0.self_attn.q_norm.weight",
                ((0, 2, 3), (1,)),
            ),
            Plant(
                f"{_LAYER}mlp.linear_fc2.weight",
                3,
                "model.layers.0.mlp.down_proj.weight (tensor shard 1 of 2)",
                ((1,), (3,)),
            ),
        ],
    ),
    "tied over stages": World(
        "qwen2_tied",
        {"parallel": {"tensor": 2, "pipeline": 2, "sequence": True}},
        [
            Plant(
                "output_layer.weight",
                2,
                "model.embed_tokens.weight (tensor shard 0 of 2)",
                ((0,), (2,)),
            )
        ],
    ),
    "experts": World(
        "qwen3_moe",
        {"parallel": {"tensor": 2, "sequence": True, "expert": 2}},
        [
            Plant(
                f"{_LAYER}mlp.experts.linear_fc1.weight1",
                3,
                "model.layers.0.mlp.experts.3.gate_proj.weight, "
                "model.layers.0.mlp.experts.3.up_proj.weight",
                ((1,), (3,)),
            ),
            Plant(
                f"{_LAYER}mlp.router.weight",
                2,
                "model.layers.0.mlp.gate.weight",
                ((0, 1, 3), (2,)),
            ),
        ],
    ),
    "experts without expert parallelism": World(
        "mixtral",
        {"parallel": {"tensor": 4, "sequence": True}},
        [
            Plant(
                f"{_LAYER}mlp.experts.linear_fc2.weight3",
                0,
                "model.layers.0.block_sparse_moe.experts.3.w2.weight",
                ((0,), (1, 2, 3)),
            )
        ],
    ),
    "half precision": World(
        "qwen2",
        {"model": {"dtype": "bfloat16"}, "optimizer": {"distributed": False}},
        [
            Plant(
                f"{_LAYER}self_attention.linear_proj.weight",
                1,
                "the optimizer's copy of model.layers.0.self_attn.o_proj.weight",
                ((0, 2, 3), (1,)),
                of_optimizer=True,
            )
        ],
    ),
    "half precision, sharded optimizer": World(
        "qwen2_tied",
        {"parallel": {"pipeline": 2}, "model": {"dtype": "bfloat16"}},
        [
            Plant(
                "output_layer.weight",
                3,
                "the optimizer's copy of model.embed_tokens.weight",
                ((0, 1), (2, 3)),
                of_optimizer=True,
            )
        ],
    ),
}


@dataclass(frozen=True)
class Seen:
    """Differences that one rank found: after two healthy steps, with each flipped bit, and after
    the bits were restored."""

    healthy: list[Difference]
    planted: list[list[Difference]]
    after: list[Difference]


def plant_everywhere(models: dict[str, str]) -> dict[str, Seen]:
    """Run in each rank: flip and restore the bits of every world of `WORLDS`, and return the
    differences found."""
    found = {}
    for name, world in WORLDS.items():
        config = settings(
            Path(models[world.model]),
            {
                **world.changes,
                "parallel": {"ranks": 4, **world.changes.get("parallel", {})},
                "optimizer": {"lr": 1e-2, **world.changes.get("optimizer", {})},
                "trainer": {"compare_replicas_every_steps": 0},
            },
        )
        with trainer_session(config) as trainer:
            check = ReplicaCheck(trainer.model[0], trainer.optimizer, every_steps=1)
            for step in range(2):
                assert not trainer.train_batch(ragged_batch(step)).skipped
            healthy, planted = check.compare(), []
            for plant in world.plants:
                _flip_a_bit(trainer, plant)
                planted.append(check.compare())
                _flip_a_bit(trainer, plant)
            found[name] = Seen(healthy, planted, check.compare())
    return found


@torch.no_grad()
def _flip_a_bit(trainer: Any, plant: Plant) -> None:
    """Flip the lowest bit of an element of the float32 or bfloat16 copy."""
    if dist.get_rank() == plant.rank:
        values = dict(trainer.model[0].named_parameters())[plant.parameter]
        if plant.of_optimizer:
            values = values.main_param
        bits_N = values.detach().view(-1).view(torch.int32 if values.itemsize == 4 else torch.int16)
        bits_N[3] ^= 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for name in {world.model for world in WORLDS.values()}:
        save_hf_model(name, root / name)
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture(scope="module")
def seen(models: dict[str, str]) -> list[dict[str, Seen]]:
    return run_ranks(plant_everywhere, 4, models, timeout_seconds=480)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_replica_check_finds_no_difference_after_healthy_steps(
    name: str, seen: list[dict[str, Seen]]
) -> None:
    assert [rank[name].healthy + rank[name].after for rank in seen] == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_replica_check_names_a_flipped_bit_of_one_rank_on_all_ranks(
    name: str, seen: list[dict[str, Seen]]
) -> None:
    expected = [[Difference(plant.message, plant.rank_groups)] for plant in WORLDS[name].plants]
    for rank in seen:
        assert rank[name].planted == expected


def train_until_it_stops(model: str, every: int, wrong_from: int, steps: int) -> tuple[int, str]:
    """Return this rank's number of completed steps and the error; from a step on, rank 1's gradient
    of a norm is wrong."""
    config = settings(
        Path(model),
        {
            "parallel": {"ranks": 2, "tensor": 2},
            "optimizer": {"lr": 1e-2},
            "trainer": {"compare_replicas_every_steps": every},
        },
    )
    with trainer_session(config) as trainer:
        norm = dict(trainer.model[0].named_parameters())["decoder.final_layernorm.weight"]

        def change(gradient: torch.Tensor) -> torch.Tensor:
            wrong = dist.get_rank() == 1 and trainer.step >= wrong_from
            return gradient * 2 if wrong else gradient

        norm.register_hook(change)
        for step in range(steps):
            try:
                trainer.train_batch(ragged_batch(step))
            except ComponentFailure as error:
                return step, str(error)
    return steps, ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "wrong_from", "stop_step"),
    [(10, 0, 0), (3, 1, 2), (0, 0, 4)],
    ids=["after the first step", "every three steps", "never"],
)
def test_training_stops_at_the_next_comparison_when_copies_differ(
    every: int, wrong_from: int, stop_step: int, models: dict[str, str]
) -> None:
    results = run_ranks(
        train_until_it_stops, 2, models["qwen3"], every, wrong_from, 4, timeout_seconds=120
    )
    assert results[0] == results[1], "every rank must raise the same error"
    steps, message = results[0]
    assert steps == stop_step
    if every:
        assert message.startswith(
            "weights that must be equal on several trainer ranks differ: model.norm.weight "
            "(not the same on rank 0 and on rank 1); "
        )

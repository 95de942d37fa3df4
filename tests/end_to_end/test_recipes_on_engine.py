"""Tests every recipe, and thereby every schedule preset, on a real engine for a few steps.

One SGLang server is started once, and one trainer rank runs in this process. Everything between
them is real: scheduler, store, scorer, loss, and weight transfer with its checks.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge, read_yaml
from megatron_async.config.recipes import RECIPES
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.store.lineage import Consumption
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.testing import local
from megatron_async.testing.local import train_locally
from megatron_async.trainer.offload import DeviceContents, TrainerOffloader

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(240)]

CONFIGS = Path(__file__).parents[2] / "configs"
OWN_LOSS = Path(__file__).parents[2] / "examples" / "own_loss" / "config.yaml"
STEPS = 3
# A long tail of forced lengths: only the tokens are random, not the lengths.
LENGTHS = [12, 16, 20, 24, 12, 16, 48, 96]


def settings(recipe: str, root: Path, model: Path) -> RunConfig:
    return build_config(
        merge(
            {**read_yaml(CONFIGS / "quickstart.yaml"), "schedule": {}, "algorithm": {}},
            {
                "name": recipe,
                "root": str(root),
                "steps": STEPS,
                "model": {"path": str(model)},
                "parallel": {"ranks": 1, "tensor": 1},
                "algorithm": read_yaml(OWN_LOSS)["algorithm"]
                if recipe == "own_loss"
                else {"recipe": recipe},
                "schedule": {"groups_per_batch": 4, "group_size": 4, "concurrency": 16}
                | ({"updates_per_batch": 2} if recipe == "rapid" else {}),
                "sampling": {"max_new_tokens": 96},
                "engines": {"max_total_tokens": 16384},
                "eval": {"prompts": 4},
                "checkpoint": {"every_steps": 100, "export_hf": False},
                "experiment": {"forced_lengths": LENGTHS},
            },
        )
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "model"
    build_tiny_model(path, seed=1)
    return path


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    root = tmp_path_factory.mktemp("engine")
    config = settings("copris", root, model)
    process = SGLangProcess(model, config.engines, root / "engine.log")
    process.start()
    yield process
    process.stop()


@pytest.mark.parametrize("recipe", [*(name for name in RECIPES if name != "sft"), "own_loss"])
def test_recipe_trains_every_batched_trajectory_once(
    recipe: str, tmp_path: Path, model: Path, engine: SGLangProcess
) -> None:
    config = settings(recipe, tmp_path, model)
    # Random weights solve no problem, so the reward must vary in each group to give a gradient.
    scorer = LengthParity()
    directory = RunDirectory.create(config)
    train_locally(config, directory, [engine.url], scorer)

    lines = read_metrics(directory.metrics_file)
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line in lines:
        assert np.isfinite(line["train/loss"])
        assert line["train/grad_norm"] > 0, "no gradient reached the weights"
        assert line["train/skipped_updates"] == 0
        assert line["weights/probe_mean_error"] < 1e-4
    bound = config.schedule.max_async_level
    if bound is not None and config.schedule.on_stale != "mask":
        assert max(line["rollout/lag_max"] for line in lines) <= bound
    if recipe == "copris":  # Early termination always leaves long responses behind.
        assert max(line["rollout/lag_max"] for line in lines) > 0, (
            "some trajectories must be resumed"
        )
    with closing(StoreReader(directory.store_file)) as reader:
        content = reader.content()
    consumption = Consumption.at(content.tree, content.tree.newest)
    # A batch that was ready when the last step ended was not trained.
    batches = [b for b in content.batches if consumption.contains(b.lineage, b.step)]
    trained = [i for b in batches if b.step < STEPS for i in b.ids()]
    size = config.schedule.groups_per_batch * config.schedule.group_size
    assert len(trained) == len(set(trained)) == STEPS * size


class LengthParity:
    """Scorer whose reward depends only on the length of a response; each group has responses of 12
    and 16 tokens."""

    size = ScorerCount(1)
    failures: Mapping[str, str] = MappingProxyType({})

    async def score(
        self, prompt: object, response_ids: list[int]
    ) -> tuple[float, dict[str, float]]:
        return float(len(response_ids) % 8 == 0), {}


def test_rapid_trainer_and_engine_alternate_on_shared_devices(
    tmp_path: Path, model: Path, engine: SGLangProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's storages are emptied while the engine generates, even on a CPU."""
    plain = settings("rapid", tmp_path, model)
    config = build_config(
        merge(
            plain.model_dump(),
            {"engines": {"placement": "colocated"}, "weights": {"transport": "tensor"}},
        )
    )
    calls: list[str] = []
    for name in ("release_memory", "resume_memory"):
        real = getattr(SGLangClient, name)

        async def recorded(client: SGLangClient, real: Any = real, **options: bool) -> None:
            await real(client, **options)
            calls.append(f"engine {options}")

        monkeypatch.setattr(SGLangClient, name, recorded)

    class RecordingOffloader(TrainerOffloader):
        def keep_on_device(self, residence: DeviceContents) -> None:
            super().keep_on_device(residence)
            calls.append(f"trainer {residence.value}")

    monkeypatch.setattr(
        local,
        "trainer_memory",
        lambda config, trainer: RecordingOffloader(trainer, lambda tensor: True),
    )
    directory = RunDirectory.create(config)
    local.train_locally(config, directory, [engine.url], LengthParity())
    lines = read_metrics(directory.metrics_file)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(line["weights/probe_mean_error"] < 1e-4 for line in lines)
    update = [
        "trainer weights",
        "engine {'weights_only': True}",
        "trainer nothing",
        "engine {'weights_only': False}",
        "engine {'keep_weights': True}",  # After its samples, the trainer computes log-probs.
        "trainer weights",
        "trainer nothing",
        "engine {'weights_only': False}",
    ]
    released = "engine {'keep_weights': False}"
    step = [released, "trainer all"]
    # The checkpoint of the last step loads the complete trainer once more.
    expected = [released, *update, *(step + update) * (STEPS - 1), *step, "trainer all"]
    assert calls == [*expected, *update, *step]

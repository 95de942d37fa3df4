"""Every recipe, and with them every schedule preset, on the real engine for a few steps.

One warm SGLang server and one trainer rank in this process; everything between them is the real
thing: scheduler, store, scorer, loss, weight exchange with its checks.
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
# A long tail of forced lengths: what is random is only which tokens, not how long.
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
def test_recipe_trains_and_accounts_for_every_trajectory(
    recipe: str, tmp_path: Path, model: Path, engine: SGLangProcess
) -> None:
    config = settings(recipe, tmp_path, model)
    # Random weights are never right: a reward that varies in each group gives a gradient.
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
    if recipe == "copris":  # early termination leaves long ones behind, whatever the timing
        assert max(line["rollout/lag_max"] for line in lines) > 0, "nothing was carried over"
    with closing(StoreReader(directory.store_file)) as reader:
        content = reader.content()
    consumption = Consumption.at(content.tree, content.tree.newest)
    # A batch that generation had ready when the last step ended was never trained on.
    batches = [b for b in content.batches if consumption.contains(b.lineage, b.step)]
    trained = [i for b in batches if b.step < STEPS for i in b.ids()]
    size = config.schedule.groups_per_batch * config.schedule.group_size
    assert len(trained) == len(set(trained)) == STEPS * size


class LengthParity:
    """A scorer whose reward depends on the length only: each group has responses of 12 and 16."""

    size = ScorerCount(1)
    failures: Mapping[str, str] = MappingProxyType({})

    async def score(
        self, prompt: object, response_ids: list[int]
    ) -> tuple[float, dict[str, float]]:
        return float(len(response_ids) % 8 == 0), {}


def test_rapid_and_the_engine_take_turns_on_shared_devices(
    tmp_path: Path, model: Path, engine: SGLangProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's storages are really emptied while the engine generates, also on a CPU."""
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

        async def noted(client: SGLangClient, real: Any = real, **kept: bool) -> None:
            await real(client, **kept)
            calls.append(f"engine {kept}")

        monkeypatch.setattr(SGLangClient, name, noted)

    class Emptied(TrainerOffloader):
        def keep_on_device(self, residence: DeviceContents) -> None:
            super().keep_on_device(residence)
            calls.append(f"trainer {residence.value}")

    monkeypatch.setattr(
        local, "trainer_memory", lambda config, trainer: Emptied(trainer, lambda tensor: True)
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
        "engine {'keep_weights': True}",  # it has sampled; the trainer computes its log-probs
        "trainer weights",
        "trainer nothing",
        "engine {'weights_only': False}",
    ]
    rests = "engine {'keep_weights': False}"
    step = [rests, "trainer all"]
    # The checkpoint of the last step asks for the whole trainer once more.
    expected = [rests, *update, *(step + update) * (STEPS - 1), *step, "trainer all"]
    assert calls == [*expected, *update, *step]

"""Tests a shortened training of the example game by commands, on a real engine: RL must make the
policy win more often.

`python -m benchmarks.episodes` runs the complete experiment, with several seeds, both schedules and
the control.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from megatron_async.run_directory import RunDirectory
from megatron_async.store import export
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "guessing_game"
UPDATES, GAMES = 10, 256
CHANCE = (2 * 0.25 / GAMES) ** 0.5
"""Largest possible standard deviation of the difference of two success rates over `GAMES` games
each."""

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600)]


def python(*words: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=400, env=environment)


def test_guessing_game_success_rises_when_trained_on_its_rewards(tmp_path: Path) -> None:
    config, model = str(EXAMPLE / "config.yaml"), tmp_path / "fine_tuned"
    python(str(EXAMPLE / "prepare.py"), str(tmp_path), "--games", "5000")
    run_settings = [f"root={tmp_path}", "name=game", "telemetry.trackers=[]"]
    data_settings = [f"model.path={tmp_path / 'model'}", f"sft.data={tmp_path / 'games.jsonl'}"]
    sft = [*run_settings, *data_settings, "sft.steps=60", "sft.examples=3840"]
    python("-m", "megatron_async.cli", "sft", "--config", config, "--out", str(model), *sft)
    rl = [
        *run_settings,
        data_settings[1],
        f"model.path={model}",
        f"steps={UPDATES}",
        "checkpoint.export_hf=false",
        f"eval.prompts={GAMES}",
    ]
    python("-m", "megatron_async.cli", "train", "--config", config, *rl)

    directory = RunDirectory(tmp_path / "game")
    before, after = (
        line["eval/accuracy"] for line in read_metrics(directory.metrics_file, kind="eval")
    )
    assert after - before > 3.5 * CHANCE, f"{before:.3f} before, {after:.3f} after"
    with closing(StoreReader(directory.store_file)) as reader:
        listed = [*reader.summaries(), *export.summaries(reader)]
        trained = [s for s in listed if s.batched_step is not None]
        assert len(trained) == UPDATES * 16 * 8
        assert max(s.turn_count for s in trained) == 7
        won = next(s for s in trained if s.reward == 1.0 and s.turn_count > 1)
        episode = export.find(reader, won.trajectory_id)
        assert [turn.reward for turn in episode.turns] == [0.0] * (won.turn_count - 1) + [1.0]
        (branch,) = episode.branches()
        assert 0 < branch.mask.sum() < len(branch.token_ids)

"""Simulated against measured: the step time of episodes that call a tool, on the CPU engine.

    python -m benchmarks.simulated_episode --folder runs/episodes

`benchmarks.simulated_step` for episodes of --turns turns with a tool that takes --seconds
(`slow_tool.py`). The model is the untrained one of the example `guessing_game`, which is made where
it is missing: its answers have any length up to --tokens. Beside what it gets there, the simulator
gets of the first half of the steps the mean number of turns, the mean seconds of a reply, the mean
length of what the environment sends, and the lengths of answers. Goal: within 15 %.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import simulated_step
from benchmarks.command import command_line
from benchmarks.episodes import ROOT, untrained_model
from megatron_async.config import build_config
from megatron_async.config.load import merge, read_yaml
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.run_directory import RunDirectory
from megatron_async.store import export
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.trajectory.types import Trajectory

EXAMPLE = ROOT / "examples" / "guessing_game"


def settings(model: Path, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The example's, in one process, with a slow tool, and nothing learned."""
    environment = {
        "name": f"{ROOT / 'benchmarks' / 'slow_tool.py'}:SlowTool",
        "arguments": {"turns": options.turns, "seconds": options.seconds},
    }
    changes = {
        "name": "measured",
        "root": str(root),
        "steps": options.warm_up + options.steps,
        "model": {"path": str(model)},
        "parallel": {"ranks": 1},
        "sampling": {"max_new_tokens": options.tokens},
        "schedule": {"groups_per_batch": 6, "concurrency": 32},
        "eval": {"prompts": 8},
        "checkpoint": {"every_steps": 10_000, "export_hf": False},
        "optimizer": {"lr": 1e-12, "warmup_steps": 0},
    }
    played = {"environment": environment, "episode": {"max_turns": options.turns}}
    return {**merge(read_yaml(EXAMPLE / "config.yaml"), changes), **played}


def episodes_of(directory: RunDirectory) -> list[Trajectory]:
    """The episodes that have ended."""
    with closing(StoreReader(directory.store_file)) as reader:
        everything = [*reader.summaries(), *export.summaries(reader)]
        ended = [s.trajectory_id for s in everything if s.turns and s.finish_reason is not None]
        return [export.find(reader, number) for number in ended]


def shape_of(episodes: list[Trajectory]) -> tuple[dict[str, Any], list[int]]:
    """What the simulator gets of episodes, and the lengths of answers."""
    answers, observations = [], []
    for episode in episodes:
        for turn in episode.turns:
            parts = episode.segments_of(turn)
            answers.append(sum(len(part) for part in parts if not part.from_environment))
            observations.append(sum(len(part) for part in parts if part.from_environment))
    turns = float(np.mean([len(episode.turns) for episode in episodes]))
    sent = max(1, round(float(np.mean(observations))))
    return {"turns": turns, "observation_tokens": sent}, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "episodes")
    parser.add_argument("--turns", type=int, default=5, help="of an episode")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a tool's reply")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, at most")
    parser.add_argument("--steps", type=int, default=16, help="measured steps (two halves)")
    parser.add_argument("--warm-up", type=int, default=4, help="steps left out before them")
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    model = untrained_model("guessing_game", options.folder)
    with tempfile.TemporaryDirectory(prefix="simulated-episode-") as scratch:
        root = Path(scratch)
        base = settings(model, root, options)
        config = build_config(base)
        process = SGLangProcess(model, config.engines, root / "engine.log")
        process.start()
        try:
            costs = simulated_step.measure_engine(config, process.url)
            (root / "engine.yaml").write_text(yaml.safe_dump(costs, sort_keys=False))
            directory = simulated_step.train(config, process.url)
        finally:
            process.stop()
        lines = read_metrics(directory.metrics_file)[options.warm_up :]
        half = len(lines) // 2
        episode, lengths = shape_of(episodes_of(directory))
        seconds = [line["rollout/environment_seconds"] for line in lines[:half]]
        episode["tool_seconds"] = float(np.mean(seconds))
        summary = simulated_step.predict(base, lines[:half], lengths, root, episode)
    text = simulated_step.compare(summary, lines[half:], lengths)
    given = ", ".join(f"{name} {value:.4g}" for name, value in episode.items())
    text += f"\n\nEpisodes: {given}."
    print(text)
    if options.out is not None:
        command = command_line("benchmarks.simulated_episode")
        title = "# The simulator against a real run of episodes: seconds of a step"
        made = f"`{command}`, {datetime.date.today()}, {os.cpu_count()} cores"
        options.out.write_text(f"{title}\n\n{made}\n\n{text}\n")


if __name__ == "__main__":
    main()

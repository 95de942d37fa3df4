"""Compares the simulated and the measured step time of episodes that call a tool, on a CPU.

    python -m benchmarks.simulated_episode --folder runs/episodes

The program works as `benchmarks.simulated_step`, with episodes of --turns turns and a tool that
takes --seconds for each reply (`slow_tool.py`). It uses the untrained model of the example
`guessing_game`, and creates the model if it is missing. The responses of this model have any length
up to --tokens.

In addition to the inputs of `benchmarks.simulated_step`, the simulator gets measured values of the
episodes: the mean number of turns, the mean length of the environment's messages and the lengths of
responses, over all episodes, and the mean seconds of a reply, over the first half of the steps. The
goal is a difference of at most 15 %.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import simulated_step
from benchmarks.episodes import untrained_model
from benchmarks.reporting import ROOT, publish
from megatron_async.config.load import merge, read_yaml
from megatron_async.run_directory import RunDirectory
from megatron_async.store import export
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.trajectory.types import Trajectory

EXAMPLE = ROOT / "examples" / "guessing_game"


def settings(model: Path, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the example's settings with one rank, a slow tool, and a learning rate near 0."""
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
    """Return the ended episodes of a run, also those that compaction has exported."""
    with closing(StoreReader(directory.store_file)) as reader:
        everything = [*reader.summaries(), *export.summaries(reader)]
        ended = [s.trajectory_id for s in everything if s.turns and s.finish_reason is not None]
        return [export.find(reader, number) for number in ended]


def shape_of(episodes: list[Trajectory]) -> tuple[dict[str, Any], list[int]]:
    """Return the simulator's settings for these episodes, and the lengths of all responses."""
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
    parser.add_argument("--turns", type=int, default=5, help="turns of an episode")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of a tool's reply")
    parser.add_argument("--tokens", type=int, default=32, help="longest response, in tokens")
    parser.add_argument(
        "--steps", type=int, default=16, help="number of measured steps, in two halves"
    )
    parser.add_argument(
        "--warm-up", type=int, default=4, help="number of earlier steps that are not measured"
    )
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    model = untrained_model("guessing_game", options.folder)
    with tempfile.TemporaryDirectory(prefix="simulated-episode-") as scratch:
        root = Path(scratch)
        base = settings(model, root, options)
        directory = simulated_step.measure_both(base, root)
        lines = read_metrics(directory.metrics_file)[options.warm_up :]
        half = len(lines) // 2
        episode, lengths = shape_of(episodes_of(directory))
        seconds = [line["rollout/environment_seconds"] for line in lines[:half]]
        episode["tool_seconds"] = float(np.mean(seconds))
        summary = simulated_step.predict(base, lines[:half], lengths, root, episode)
    text = simulated_step.compare(summary, lines[half:], lengths)
    given = ", ".join(f"{name} {value:.4g}" for name, value in episode.items())
    text += f"\n\nEpisodes: {given}."
    title = "The simulator against a real run of episodes: seconds of a step"
    publish("benchmarks.simulated_episode", title, text, options.out)


if __name__ == "__main__":
    main()

"""Measures on the real engine whether policies learn in the example environments.

    python -m benchmarks.episodes --folder runs/episodes                # all runs: about an hour
    python -m benchmarks.episodes --folder runs/episodes --pieces 3     # at most three more runs
    python -m benchmarks.episodes --folder runs/episodes --examples guessing_game --seeds 1
    python -m benchmarks.episodes --table                               # table of existing rows

Each example is prepared and fine-tuned once (`prepare.py`, `megatron-async sft`), with its own
settings. Every run starts from that fine-tuned model, and measures the held-out success before and
after RL. A run changes only the schedule and the seed of the example.

A control is a run in which the rewards of a group are shuffled among its members
(`benchmarks/shuffled.py`), so that the policy cannot learn from rewards. Evaluations use the true
rewards in all runs.

Every run appends its row to --rows. A run whose row exists there is not repeated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import reporting
from benchmarks.reporting import ROOT, Row, read, spread
from megatron_async.telemetry.metrics import read_metrics

EXAMPLES: Final = {"guessing_game": "games", "calculator": "conversations"}
PRESETS: Final = ("copris", "pipeline")
LONGEST_SECONDS: Final = 900.0
GOAL: Final = 0.30


def megatron_async(*words: str) -> None:
    """Run a `megatron-async` command in a separate process, as a user would run it."""
    command = [sys.executable, "-m", "megatron_async.cli", *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LONGEST_SECONDS)


def paths_of(example: str, folder: Path) -> list[str]:
    """Return the settings that name the files of a prepared example."""
    data = folder / example
    named = [f"model.path={data / 'model'}", f"sft.data={data / EXAMPLES[example]}.jsonl"]
    if example == "calculator":
        named.append(f"task.path={data / 'products.jsonl'}")
    return named


def untrained_model(example: str, folder: Path) -> Path:
    """Return the untrained model of an example; create it and the example's data if missing."""
    model = folder / example / "model"
    if not model.exists():
        script = [
            sys.executable,
            str(ROOT / "examples" / example / "prepare.py"),
            str(model.parent),
        ]
        subprocess.run(script, cwd=ROOT, check=True, timeout=LONGEST_SECONDS)
    return model


def prepare(example: str, folder: Path) -> Path:
    """Return the fine-tuned model of an example; fine-tune it if it is missing."""
    source, model = ROOT / "examples" / example, folder / "fine_tuned" / example
    untrained_model(example, folder)
    if not model.exists():
        own = [f"root={folder}", f"name={example}", *paths_of(example, folder)]
        words = ["sft", "--config", str(source / "config.yaml"), "--out", str(model)]
        megatron_async(*words, *own)
    return model


def name_of(key: Row) -> str:
    """Return the name of the run with this key."""
    control = "-shuffled" * key["shuffled"]
    return f"{key['example']}-{key['preset']}-{key['seed']}{control}"


def settings_of(key: Row, folder: Path, model: Path) -> list[str]:
    """Return the settings that a run changes in its example."""
    example = key["example"]
    settings = [
        *paths_of(example, folder)[1:],
        f"root={folder}",
        f"name={name_of(key)}",
        f"model.path={model}",
        f"seed={key['seed']}",
        f"schedule.preset={key['preset']}",
        "checkpoint.export_hf=false",
        "telemetry.progress=lines",
    ]
    if key["shuffled"]:
        of = "game" if example == "guessing_game" else "product"
        name = ROOT / "benchmarks" / "shuffled.py"
        hook = f"{{name: '{name}:Shuffled', group: true, arguments: {{of: {of}}}}}"
        settings.append(f"reward={hook}")
    return settings


def measure(key: Row, folder: Path) -> Row:
    """Make the whole run of `key`; return its row without the key."""
    model = prepare(key["example"], folder)
    config = ROOT / "examples" / key["example"] / "config.yaml"
    megatron_async("train", "--config", str(config), *settings_of(key, folder, model))
    return row_of(folder / name_of(key) / "metrics.jsonl")


def row_of(metrics: Path) -> Row:
    """Return a run's held-out success before and after RL, and means of its steps."""
    steps, evaluations = read_metrics(metrics), read_metrics(metrics, kind="eval")
    before, after = evaluations[0], evaluations[-1]
    most = max(line["rollout/lag_max"] for line in steps)
    return {
        "steps": len(steps),
        "before": before["eval/accuracy"],
        "after": after["eval/accuracy"],
        "after_low": after["eval/accuracy_low"],
        "after_high": after["eval/accuracy_high"],
        "problems": after["eval/responses"],
        "seconds": after["time"] - before["time"],
        "turns_first": steps[0]["rollout/turns_mean"],
        "turns_last": steps[-1]["rollout/turns_mean"],
        "lag_max": most,
    }


def pieces(examples: Sequence[str], seeds: int, controls: int = 1) -> list[Row]:
    """Return the keys of all runs, in the order in which they are made.

    Runs of the first seed come first, followed by their controls, the runs of other seeds and the
    controls of other seeds.

    Args:
        examples: Names of the examples.
        seeds: Number of seeds.
        controls: Number of seeds that also have a control.
    """
    runs = [
        {"example": example, "preset": preset, "seed": seed, "shuffled": False}
        for seed in range(1, seeds + 1)
        for example in examples
        for preset in PRESETS
    ]
    first = len(examples) * len(PRESETS)
    shuffled = [{**key, "shuffled": True} for key in runs[: controls * first]]
    return [*runs[:first], *shuffled[:first], *runs[first:], *shuffled[first:]]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of success before and after RL, with a line for each kind of run."""
    header = (
        "example | schedule | rewards | seeds | before, % | after, % | gained, points "
        "| turns, first and last batch | lag, most | s a run"
    )
    lines = []
    kinds = dict.fromkeys((r["example"], r["preset"], r["shuffled"]) for r in rows)
    for example, preset, shuffled in sorted(kinds):
        kind = {"example": example, "preset": preset, "shuffled": shuffled}
        of = [row for row in rows if kind.items() <= row.items()]
        turns = [spread([row[name] for row in of], 1) for name in ("turns_first", "turns_last")]
        lines.append(
            (
                example,
                preset,
                "shuffled" if shuffled else "own",
                len(of),
                spread([100 * row["before"] for row in of], 1),
                spread([100 * row["after"] for row in of], 1),
                spread([100 * (row["after"] - row["before"]) for row in of], 1),
                ", ".join(turns),
                f"{max(row['lag_max'] for row in of):.0f}",
                spread([row["seconds"] for row in of], 0),
            )
        )
    text = reporting.table(header, lines)
    short = [row for row in rows if not row["shuffled"] and row["after"] - row["before"] < GOAL]
    if short:
        text += f"\n\nBelow {100 * GOAL:.0f} points: {', '.join(map(name_of, short))}."
    return text


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "episodes")
    parser.add_argument("--examples", nargs="+", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--controls", type=int, default=1, help="number of seeds with a control")
    reporting.piece_options(parser, "episodes")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    wanted = pieces(options.examples, options.seeds, options.controls)
    folder = options.folder.absolute()
    reporting.make_missing(wanted, read(options.rows), options, lambda key: measure(key, folder))
    print(table(read(options.rows)))


if __name__ == "__main__":
    main()

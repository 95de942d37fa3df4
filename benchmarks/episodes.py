"""Learning of episodes on the real engine: the examples of environments, and their control.

    python -m benchmarks.episodes --folder runs/episodes                # all runs: about an hour
    python -m benchmarks.episodes --folder runs/episodes --pieces 3     # three more of them
    python -m benchmarks.episodes --folder runs/episodes --examples guessing_game --seeds 1
    python -m benchmarks.episodes --table                               # of the rows there are

Each example is prepared and fine-tuned once (`prepare.py`, `megatron-async sft`), with its own
settings. Every run then begins with that model: it has the held-out success before and after RL,
under a schedule and a seed, with nothing changed of the example but those. In the control each
member of a group gets the reward of another (`benchmarks/shuffled.py`): what is learned there is
not learned from rewards. Evaluations have the true rewards in all runs.

Every run appends its row to --rows; a run that has a row there is not made again.
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
    """A command of the product, as a user would give it, in a process of its own."""
    command = [sys.executable, "-m", "megatron_async.cli", *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LONGEST_SECONDS)


def paths_of(example: str, folder: Path) -> list[str]:
    """The settings that name the files of a prepared example."""
    data = folder / example
    named = [f"model.path={data / 'model'}", f"sft.data={data / EXAMPLES[example]}.jsonl"]
    return [*named, *([f"task.path={data / 'products.jsonl'}"] * (example == "calculator"))]


def untrained_model(example: str, folder: Path) -> Path:
    """The model that an example begins with, made with its data where it is not there yet."""
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
    """The fine-tuned model of an example, made where it is not there yet."""
    source, model = ROOT / "examples" / example, folder / "fine_tuned" / example
    untrained_model(example, folder)
    if not model.exists():
        own = [f"root={folder}", f"name={example}", *paths_of(example, folder)]
        words = ["sft", "--config", str(source / "config.yaml"), "--out", str(model)]
        megatron_async(*words, *own)
    return model


def name_of(key: Row) -> str:
    """The name of a run."""
    control = "-shuffled" * key["shuffled"]
    return f"{key['example']}-{key['preset']}-{key['seed']}{control}"


def settings_of(key: Row, folder: Path, model: Path) -> list[str]:
    """What a run changes of its example."""
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
    """One whole run."""
    model = prepare(key["example"], folder)
    config = ROOT / "examples" / key["example"] / "config.yaml"
    megatron_async("train", "--config", str(config), *settings_of(key, folder, model))
    return row_of(folder / name_of(key) / "metrics.jsonl")


def row_of(metrics: Path) -> Row:
    """Held-out success before and after, and what the steps were like."""
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
    """The keys of all runs: first seeds and their controls first, controls of others last."""
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
    """Markdown: success before and after, in points gained, a line for each kind of run."""
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
    """The options; the process's own arguments by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "episodes")
    parser.add_argument("--examples", nargs="+", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--controls", type=int, default=1, help="seeds that have a control")
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

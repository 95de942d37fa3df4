"""Compares two variants of a training run: different settings, different commits, or both.

    python -m benchmarks.variants --name verification --config configs/quickstart.yaml \\
        --set schedule.preset=pipeline --old commit=f8b491ec            # five pairs of runs
    python -m benchmarks.variants --name transfer --new weights.background=true ...
    python -m benchmarks.variants --name verification --table           # table of existing rows

The runs of a pair follow each other, and the order alternates from pair to pair. Each ratio is
within a pair, because the machine's speed changes within minutes. Every run trains the model of the
quickstart with random weights, unless `--set` names another one. The first steps are not measured.

A commit is checked out into a temporary directory and runs with the packages of this environment.
`--config` is a path in the repository, so each commit uses its own file of this name.

The program prints Markdown. With --out, it also writes the text with the command, the date and the
machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.reporting import (
    ROOT,
    Row,
    make_missing,
    piece_options,
    publish,
    read,
    spread,
    table,
)
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.telemetry.metrics import read_metrics

COMMIT = "commit="
TIMES = ("wait_for_batch", "train", "verify", "publish")
HEADER = "variant | tokens/s | " + " | ".join(f"{name} s" for name in TIMES) + " | pause s | lag"


def checkout(commit: str, folder: Path) -> Path:
    """Write the files of `commit` into `folder` and return it."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def measure(key: Row, options: argparse.Namespace) -> Row:
    """Make the run of the variant `key["variant"]`; return its row without the key."""
    overrides = options.old if key["variant"] == "old" else options.new
    with tempfile.TemporaryDirectory(prefix="variants-") as scratch:
        root, code = Path(scratch), ROOT
        for override in overrides:
            if override.startswith(COMMIT):
                code = checkout(override.removeprefix(COMMIT), root / "code")
        build_tiny_model(root / "model", seed=1)
        settings = {
            "name": "run",
            "root": str(root),
            "model.path": str(root / "model"),
            "steps": str(options.steps),
            "checkpoint.every_steps": "10000",
            "checkpoint.export_hf": "false",
            "telemetry.progress": "lines",
            "telemetry.trackers": "[]",
        }
        command = [sys.executable, "-m", "megatron_async.cli", "train", "--config"]
        command += [str(code / options.config)]
        command += [f"{name}={value}" for name, value in settings.items()]
        command += options.set + [o for o in overrides if not o.startswith(COMMIT)]
        path = os.pathsep.join([str(code), str(code / "kernels")])
        log = root / "log"
        with log.open("wb") as out:
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path}, stdout=out, stderr=out, cwd=root
            )
        if done.returncode != 0:
            raise SystemExit(f"{key} failed: {log.read_text(errors='replace')[-3000:]}")
        lines = read_metrics(root / "run" / "metrics.jsonl")
    return row_of(lines, options.warm_up)


def row_of(lines: Sequence[Row], warm_up: int) -> Row:
    """Return the measurements of a run without its first `warm_up` steps and its last step, which
    ends the generation.

    Tokens per second are trained tokens by the wall-clock time between the ends of steps.
    """
    before, lines = lines[warm_up - 1], lines[warm_up:-1]
    seconds = lines[-1]["time"] - before["time"]

    def mean(name: str) -> float:
        return float(np.mean([line.get(name, 0.0) for line in lines]))

    return {
        "tokens_per_second": sum(line["train/trained_tokens"] for line in lines) / seconds,
        **{name: mean(f"time/{name}") for name in TIMES},
        "pause": mean("rollout/update_pause_seconds"),
        "transfer": mean("weights/transfer_seconds"),
        "lag": mean("rollout/lag_mean"),
    }


def report(rows: Sequence[Row]) -> str:
    """Return tables with the medians and ranges of both variants, and of the ratio new / old."""
    found = {v: [row for row in rows if row["variant"] == v] for v in ("old", "new")}
    columns = (*TIMES, "pause", "lag")
    cells = [
        [
            variant,
            spread([row["tokens_per_second"] for row in of], 0),
            *(spread([row[name] for row in of]) for name in columns),
        ]
        for variant, of in found.items()
        if of
    ]
    pairs = [
        new["tokens_per_second"] / old["tokens_per_second"]
        for old in found["old"]
        for new in found["new"]
        if new["pair"] == old["pair"]
    ]
    return table(HEADER, cells) + f"\n\nTokens per second, new / old: {spread(pairs)}, {pairs}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.variants", description=__doc__)
    parser.add_argument("--name", required=True, help="name of the comparison")
    parser.add_argument("--config", type=Path, default="configs/quickstart.yaml")
    parser.add_argument("--set", nargs="*", default=[], help="settings of both variants")
    parser.add_argument("--old", nargs="*", default=[], help="settings of the first variant")
    parser.add_argument("--new", nargs="*", default=[], help="settings of the second variant")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="file for the result")
    piece_options(parser, "variants")
    options = parser.parse_args()
    wanted = [
        {"comparison": options.name, "pair": pair, "variant": variant}
        for pair in range(options.pairs)
        for variant in (("old", "new") if pair % 2 == 0 else ("new", "old"))
    ]
    make_missing(wanted, read(options.rows), options, lambda key: measure(key, options))
    rows = [row for row in read(options.rows) if row["comparison"] == options.name]
    publish("benchmarks.variants", f"Variants: {options.name}", report(rows), options.out)


if __name__ == "__main__":
    main()

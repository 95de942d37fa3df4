"""TRL's GRPOTrainer and this system on one machine's CPU: same model, task, prompts and loss.

    python -m benchmarks.versus_trl --model runs/quickstart/sft             # all that is missing
    python -m benchmarks.versus_trl --model runs/quickstart/sft --system trl --seed 1 --pieces 1
    python -m benchmarks.versus_trl --table                                 # of the rows there are

A piece is one training of one system, length distribution and seed. The systems alternate, and
every piece appends its row to --rows, so that the comparison can be stopped and gone on with. A
piece of 20 steps takes two to three minutes on two cores.

What is the same: the quickstart's fine-tuned model in float32, its problems in the same order, its
scorer, 32 groups of 8 responses a step, longest response, sampling temperature 1, Adam and its
settings, the clipped surrogate with token mean, advantages of a group divided by their deviation,
no KL. TRL runs in its own environment (versus_trl_requirements.txt, made by the first piece that
needs it), as one process with as many threads as there are cores, and trains on 64 sequences at
once, which is the fastest there of 32, 64 and 256; this system as the quickstart does. Each of them
is what its user would start.

What is counted. Start-up: until the first step begins, without evaluation. Seconds: the steps;
what TRL evaluates in between is left out, what this system evaluates is counted, because
generation goes on beside it. Tokens: those of responses. Accuracy: greedy, on the same held-out
problems, every --every steps; here it is that of the newest version that answered one of them.

`short` has the quickstart's problems. `tail` has nine short ones to each long one, so that a group
of answers of 190 tokens is in nearly every batch of answers of 30.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command_line
from benchmarks.quickstart_adam import quickstart_adam
from benchmarks.rows import Row, append, missing, read, spread
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.launcher.devices import split_of_this_machine
from megatron_async.launcher.supervisor import supervise
from megatron_async.run_directory import RunDirectory
from megatron_async.tasks import build_task
from megatron_async.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]
REQUIREMENTS = Path(__file__).with_name("versus_trl_requirements.txt")
SYSTEMS = ("trl", "megatron_async")
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "short": {},
    "tail": {
        "task": {
            "params": {
                "mixture": [
                    {"weight": 0.9, "min_terms": 4, "max_terms": 6},
                    {"weight": 0.1, "min_terms": 15, "max_terms": 18},
                ]
            }
        }
    },
}
SEEDS = (1, 2, 3)
TARGET = 0.85
_PIECE_LIMIT_SECONDS = 1500


def settings_of(distribution: str, seed: int, root: Path, options: argparse.Namespace) -> RunConfig:
    """The quickstart's settings with what differs here; both systems take theirs from it."""
    base = quickstart_adam()
    own = {
        "name": f"{distribution}-{seed}",
        "root": str(root),
        "seed": seed,
        "steps": options.steps,
        "model": {"path": str(options.model)},
        "task": {"train_seed": seed},
        "checkpoint": {"every_steps": 10_000, "export_hf": False},
        "eval": {"every_steps": options.every},
        "telemetry": {"progress": "off", "trackers": []},
    }
    return build_config(merge(merge(base, own), DISTRIBUTIONS[distribution]))


def train_here(config: RunConfig) -> Row:
    """One run of this system."""
    directory = RunDirectory.create(config)
    began = time.time()
    supervise(config, directory, split_of_this_machine(config))
    ended = time.time()
    lines = read_metrics(directory.metrics_file)
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    first = lines[0]["time"] - lines[0]["time/step"] - evaluations[0]["eval/seconds"]
    return {
        "version": commit(),
        "startup_seconds": first - began,
        "wall_seconds": ended - began,
        "step_seconds": [line["time/step"] for line in lines],
        "tokens": [line["rollout/tokens"] for line in lines],
        "rewards": [line["rollout/reward_mean"] for line in lines],
        # Answers come from the version that was due and from those that followed meanwhile.
        "accuracies": [[int(e["eval/version_newest"]), e["eval/accuracy"]] for e in evaluations],
    }


def commit() -> str:
    """The commit of the working tree."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def train_with_trl(config: RunConfig, environment: Path, scratch: Path, microbatch: int) -> Row:
    """One run of TRL in its own environment. Raises CalledProcessError when it fails."""
    python = trl_environment(environment)
    task = build_task(config.task, config.model.path, config.eval)
    count = config.steps * config.schedule.groups_per_batch

    def listed(prompts: Sequence[Any]) -> list[Row]:
        return [{"prompt": task.text(p.token_ids.tolist()), "payload": p.payload} for p in prompts]

    job = {
        "config": config.model_dump(mode="json"),
        "train": listed(task.train_prompts(0, count)),
        "heldout": listed(task.eval_prompts(config.eval.prompts)),
        "stop_token_ids": list(task.stop_token_ids),
        "out": str(scratch / "trl.json"),
        "work": str(scratch / "trl"),
        "began": time.time(),
        "microbatch": microbatch,
    }
    file = scratch / "job.json"
    file.write_text(json.dumps(job))
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    threads = str(os.cpu_count() or 1)
    subprocess.run(
        [str(python), "-m", "benchmarks.versus_trl_worker", str(file)],
        check=True,
        cwd=ROOT,
        timeout=_PIECE_LIMIT_SECONDS,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads},
    )
    row: Row = json.loads(Path(job["out"]).read_text())  # type: ignore[arg-type]
    return {**row, "wall_seconds": time.time() - float(job["began"])}  # type: ignore[arg-type]


def trl_environment(directory: Path) -> Path:
    """The Python of TRL's environment, which is made where it is not there yet."""
    python = directory / "bin" / "python"
    done = directory / "requirements.txt"
    wanted = REQUIREMENTS.read_text()
    if not done.exists() or done.read_text() != wanted:
        venv.create(directory, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)]
        subprocess.run(install, check=True, timeout=1800)
        done.write_text(wanted)
    return python


def seconds_to(row: Row, target: float) -> float | None:
    """Seconds of training until the first evaluation that reaches `target`; None: none does."""
    for step, accuracy in row["accuracies"]:
        if accuracy >= target:
            return float(sum(row["step_seconds"][:step]))
    return None


def table(rows: Sequence[Row], target: float = TARGET) -> str:
    """Markdown: for each distribution, both systems and the ratios of equal seeds."""
    out = [
        f"| lengths | system | runs | start-up s | s/step | tokens/s | reward, last quarter "
        f"| accuracy before → after | s to {target:.0%} |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    ratios: list[str] = []
    for distribution in DISTRIBUTIONS:
        for system in SYSTEMS:
            of = [r for r in rows if (r["distribution"], r["system"]) == (distribution, system)]
            if of:
                out.append(_table_row(distribution, system, of, target))
        ratios += _ratios(distribution, rows, target)
    return "\n".join([*out, "", *ratios])


def _table_row(distribution: str, system: str, rows: Sequence[Row], target: float) -> str:
    def mean_step(row: Row) -> float:
        return statistics.mean(row["step_seconds"])

    reached = [seconds_to(row, target) for row in rows]
    known = [value for value in reached if value is not None]
    never = f", {len(reached) - len(known)} never" if len(known) < len(reached) else ""
    cells = (
        spread([row["startup_seconds"] for row in rows], 0),
        spread([mean_step(row) for row in rows]),
        spread([sum(row["tokens"]) / sum(row["step_seconds"]) for row in rows], 0),
        spread([statistics.mean(_last_quarter(row["rewards"])) for row in rows], 3),
        f"{spread([100 * row['accuracies'][0][1] for row in rows], 1)} → "
        f"{spread([100 * row['accuracies'][-1][1] for row in rows], 1)} %",
        spread(known, 0) + never,
    )
    return f"| {distribution} | {system} | {len(rows)} | {' | '.join(cells)} |"


def _last_quarter(values: Sequence[float]) -> Sequence[float]:
    return values[-max(1, len(values) // 4) :]


def _ratios(distribution: str, rows: Sequence[Row], target: float) -> Iterator[str]:
    """Sentences: how many times as long TRL takes, pair by pair of one seed."""
    by_seed: dict[int, dict[str, Row]] = {}
    for row in rows:
        if row["distribution"] == distribution:
            by_seed.setdefault(row["seed"], {})[row["system"]] = row
    pairs = [both for both in by_seed.values() if len(both) == len(SYSTEMS)]
    if not pairs:
        return
    steps, to_target = [], []
    for both in pairs:
        trl, ours = (both[system] for system in SYSTEMS)
        steps.append(statistics.mean(trl["step_seconds"]) / statistics.mean(ours["step_seconds"]))
        times = seconds_to(trl, target), seconds_to(ours, target)
        if times[0] is not None and times[1]:
            to_target.append(times[0] / times[1])
    yield (
        f"`{distribution}`: TRL's time over this system's, by seed: a step {spread(steps)}, "
        f"to {target:.0%} {spread(to_target)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="fine-tuned quickstart model")
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--distribution", nargs="+", default=list(DISTRIBUTIONS))
    parser.add_argument("--seed", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between two evaluations")
    parser.add_argument("--pieces", type=int, default=1000, help="make at most so many")
    parser.add_argument("--environment", type=Path, default=ROOT / "runs" / "versus_trl-env")
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks/results/versus_trl.jsonl")
    parser.add_argument(
        "--trl-microbatch", type=int, default=64, help="sequences that TRL trains on at once"
    )
    parser.add_argument("--table", action="store_true", help="only print the table of the rows")
    parser.add_argument("--out", type=Path, help="write the table here, too")
    options = parser.parse_args()
    if not options.table:
        if options.model is None:
            parser.error("--model is needed: the quickstart leaves one in runs/quickstart/sft")
        wanted = [
            {"distribution": name, "seed": seed, "system": system, "steps": options.steps}
            for seed in options.seed
            for name in options.distribution
            for system in options.system
        ]
        for key in missing(wanted, read(options.rows))[: options.pieces]:
            append(options.rows, key | measure(key, options))
    text = table(read(options.rows))
    print(text)
    if options.out is not None:
        command = command_line("benchmarks.versus_trl")
        options.out.write_text(f"`{command}`, {datetime.date.today()}\n\n{text}\n")


def measure(key: Row, options: argparse.Namespace) -> Row:
    """One piece."""
    print(key, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="versus-trl-") as scratch:
        config = settings_of(key["distribution"], key["seed"], Path(scratch), options)
        if key["system"] == "trl":
            found = train_with_trl(
                config, options.environment, Path(scratch), options.trl_microbatch
            )
        else:
            found = train_here(config)
    return {**found, "date": f"{datetime.date.today()}", "cores": os.cpu_count()}


if __name__ == "__main__":
    main()

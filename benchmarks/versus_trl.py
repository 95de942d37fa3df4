"""Compares TRL's GRPOTrainer and megatron_async on one CPU, with equal model, task and loss.

    python -m benchmarks.versus_trl --model runs/quickstart/sft             # all missing pieces
    python -m benchmarks.versus_trl --model runs/quickstart/sft --system trl --seed 1 --pieces 1
    python -m benchmarks.versus_trl --table                                 # table of existing rows

A piece is a training of one system with one length distribution and one seed. The systems
alternate. Every piece appends its row to --rows, so you can stop the comparison and continue it
later. A piece of 20 steps takes two to three minutes on two cores.

Equal in both systems: the quickstart's fine-tuned model in float32, its problems in the same order,
its scorer, 32 groups of 8 responses per step, the longest response, sampling temperature 1, Adam
and its settings, the clipped surrogate with token mean, advantages divided by the standard
deviation of the group, and no KL.

Different: each system is started as its user would start it. TRL runs in a separate environment
(versus_trl_requirements.txt), which the first piece of TRL installs. It is one process with one
thread for each core, and trains on 64 sequences at once, which was the fastest of 32, 64 and 256.
megatron_async runs as in the quickstart.

Measurements:
- Start-up: seconds until the first step starts, without evaluation.
- Seconds: time of the steps. Evaluations of TRL between steps do not count. Evaluations of
  megatron_async count, because it generates other responses at the same time.
- Tokens: tokens of responses.
- Accuracy: greedy, on the same held-out problems, every --every steps. For megatron_async, it
  belongs to the newest version that generated one of the responses.

Distributions: `short` has the quickstart's problems. `tail` has nine short problems for each long
problem. Short problems have responses of about 30 tokens, and nearly every batch has a group of
responses of about 190 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.papers.training import quickstart_adam
from benchmarks.reporting import ROOT, Row, spread
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.launcher.devices import split_of_this_machine
from megatron_async.launcher.supervisor import supervise
from megatron_async.run_directory import RunDirectory
from megatron_async.tasks import build_task
from megatron_async.telemetry.metrics import read_metrics

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
TRL_MICROBATCH = 64
_PIECE_LIMIT_SECONDS = 1500


def settings_of(distribution: str, seed: int, root: Path, options: argparse.Namespace) -> RunConfig:
    """Return the quickstart's settings with the changes of one piece; both systems use them."""
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
    """Make one run of megatron_async; return its row without the key."""
    directory = RunDirectory.create(config)
    began = time.time()
    supervise(config, directory, split_of_this_machine(config))
    ended = time.time()
    lines = read_metrics(directory.metrics_file)
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    first = lines[0]["time"] - lines[0]["time/step"] - evaluations[0]["eval/seconds"]
    return {
        "version": reporting.commit(),
        "startup_seconds": first - began,
        "wall_seconds": ended - began,
        "step_seconds": [line["time/step"] for line in lines],
        "tokens": [line["rollout/tokens"] for line in lines],
        "rewards": [line["rollout/reward_mean"] for line in lines],
        # Responses of an evaluation come from its version and from versions published during it.
        "accuracies": [[int(e["eval/version_newest"]), e["eval/accuracy"]] for e in evaluations],
    }


def train_with_trl(config: RunConfig, environment: Path, scratch: Path) -> Row:
    """Make one run of TRL in its separate environment; return its row without the key.

    Raises:
        subprocess.CalledProcessError: TRL or the installation of its environment failed.
    """
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
        "microbatch": TRL_MICROBATCH,
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
    """Return the Python of TRL's environment; install it if it is missing or outdated."""
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
    """Return the seconds of training until an evaluation reaches `target`; None if none does."""
    for step, accuracy in row["accuracies"]:
        if accuracy >= target:
            return float(sum(row["step_seconds"][:step]))
    return None


def table(rows: Sequence[Row], target: float = TARGET) -> str:
    """Return a Markdown table of both systems, and the ratios of equal seeds."""
    header = (
        "lengths | system | runs | start-up s | s/step | tokens/s | reward, last quarter "
        f"| accuracy before → after | s to {target:.0%}"
    )
    lines, ratios = [], list[str]()
    for distribution in DISTRIBUTIONS:
        for system in SYSTEMS:
            of = [r for r in rows if (r["distribution"], r["system"]) == (distribution, system)]
            if of:
                lines.append([distribution, system, *_cells(of, target)])
        ratios += _ratios(distribution, rows, target)
    return "\n".join([reporting.table(header, lines), "", *ratios])


def _cells(rows: Sequence[Row], target: float) -> list[str]:
    """Return the cells of one system's runs, starting with the number of runs."""
    reached = [seconds_to(row, target) for row in rows]
    known = [value for value in reached if value is not None]
    never = f", {len(reached) - len(known)} never" if len(known) < len(reached) else ""
    rewards = [row["rewards"][-max(1, len(row["rewards"]) // 4) :] for row in rows]
    return [
        str(len(rows)),
        spread([row["startup_seconds"] for row in rows], 0),
        spread([statistics.mean(row["step_seconds"]) for row in rows]),
        spread([sum(row["tokens"]) / sum(row["step_seconds"]) for row in rows], 0),
        spread(list(map(statistics.mean, rewards)), 3),
        f"{spread([100 * row['accuracies'][0][1] for row in rows], 1)} → "
        f"{spread([100 * row['accuracies'][-1][1] for row in rows], 1)} %",
        spread(known, 0) + never,
    ]


def _ratios(distribution: str, rows: Sequence[Row], target: float) -> Iterator[str]:
    """Yield a sentence with the ratios of TRL's times to megatron_async's, for equal seeds."""
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
        f"`{distribution}`: TRL's time over megatron_async's, by seed: a step {spread(steps)}, "
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
    parser.add_argument("--environment", type=Path, default=ROOT / "runs" / "versus_trl-env")
    reporting.piece_options(parser, "versus_trl")
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
    options = parser.parse_args()
    if options.model is None and not options.table:
        parser.error("--model is not set. Name a model, for example runs/quickstart/sft.")
    wanted = [
        {"distribution": name, "seed": seed, "system": system, "steps": options.steps}
        for seed in options.seed
        for name in options.distribution
        for system in options.system
    ]
    reporting.make_missing(
        wanted, reporting.read(options.rows), options, lambda key: measure(key, options)
    )
    text = table(reporting.read(options.rows))
    reporting.publish(
        "benchmarks.versus_trl", "Comparison with TRL's GRPOTrainer", text, options.out
    )


def measure(key: Row, options: argparse.Namespace) -> Row:
    """Make the piece of `key`; return its row without the key."""
    with tempfile.TemporaryDirectory(prefix="versus-trl-") as scratch:
        config = settings_of(key["distribution"], key["seed"], Path(scratch), options)
        if key["system"] == "trl":
            found = train_with_trl(config, options.environment, Path(scratch))
        else:
            found = train_here(config)
    return {**found, "cores": os.cpu_count()}


if __name__ == "__main__":
    main()

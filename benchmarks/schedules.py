"""Compares schedules on the real engine, with the same prompts and the same response lengths.

    python -m benchmarks.schedules --presets sync copris           # five pairs: about an hour
    python -m benchmarks.schedules --presets sync copris --pieces 4     # at most four of these runs
    python -m benchmarks.schedules --table                         # table of existing rows

Lengths. The length of every response is forced: each trajectory ID has a recorded length. The
lengths `tail` have a long tail. The lengths `uniform` are all equal; this is the negative control,
in which asynchrony must gain nothing. The model has the quickstart's architecture and random
weights. Everything else is as in a real run, with SGLang, and Megatron under torchrun. All numbers
are per optimizer step, and each step trains the same number of trajectories. A batch of `rapid` is
H times as large and is trained in H minibatches.

Equal work. Schedules are compared by the trained tokens per second in which requests may run. The
seconds of a step are not comparable: a schedule that trains first on the responses that end first
trains on shorter responses. Over a whole run, the lengths even out, but not over the first steps,
which are not measured.

Sizes. On a CPU core, a decode step of this model takes about 4.6 ms, plus 0.1 to 0.2 ms for each
running request. With the default of 32 requests, the constant part is a large part of the time, as
on a GPU. With hundreds of requests, an idle slot costs nothing, and no schedule can gain.

Repetitions. The schedules alternate. Each ratio compares two runs of the same repetition, because
the machine's speed changes within minutes. If ratios spread by more than 25 % of their median, they
are marked as void.

The program prints Markdown. With --out, it also writes the text with the command, the date and the
machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.training import quickstart_adam
from benchmarks.reporting import Row, make_missing, piece_options, publish, read, spread, table
from megatron_async.config import build_config
from megatron_async.config.load import merge
from megatron_async.launcher.devices import split_of_this_machine
from megatron_async.launcher.supervisor import supervise
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import read_metrics

MAX_SPREAD = 0.25
RAPID_UPDATES = 4
GROUP = 8
SIZES = ("warm_up", "steps", "groups", "concurrency", "longest")
PRESETS = ["sync", "rapid", "copris", "pipeline", "async"]


def forced_lengths(kind: str, count: int, longest: int) -> list[int]:
    """Return `count` response lengths.

    Args:
        kind: `tail` for a log-normal distribution that is clipped at `longest`, or `uniform` for
            the mean of that distribution.
        count: Number of lengths.
        longest: Largest length.
    """
    rng = np.random.default_rng(0)
    tail = np.exp(rng.normal(0.0, 1.0, count))
    tail = np.clip(np.round(tail / np.quantile(tail, 0.995) * longest), 8, longest).astype(int)
    if kind == "tail":
        return [int(length) for length in tail]
    return [round(float(tail.mean()))] * count


def settings_of(
    preset: str, kind: str, model: Path, root: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the settings that differ from the quickstart's settings."""
    updates = RAPID_UPDATES if preset == "rapid" else 1
    batch = options.groups * updates
    return {
        "name": f"{preset}-{kind}",
        "root": str(root),
        "steps": (options.steps + options.warm_up) // updates,
        "model": {"path": str(model)},
        "schedule": {
            "preset": preset,
            "groups_per_batch": batch,
            "group_size": GROUP,
            # `sync` and `rapid` have their whole batch in flight, the other schedules N' requests.
            "concurrency": batch * GROUP if preset in ("sync", "rapid") else options.concurrency,
            "updates_per_batch": updates,
        },
        "checkpoint": {"every_steps": 10_000, "export_hf": False},
        "telemetry": {"progress": "off", "trackers": []},
        "sampling": {"max_new_tokens": options.longest},
        "engines": {"max_total_tokens": 131072},
        "eval": {"prompts": 8},
        "experiment": {"forced_lengths": forced_lengths(kind, 4096, options.longest)},
    }


def measure(key: Row, options: argparse.Namespace) -> Row:
    """Make the whole run of `key`; return its row without the key."""
    with tempfile.TemporaryDirectory(prefix="schedules-") as scratch:
        root = Path(scratch)
        build_tiny_model(root / "model", seed=1)
        changes = settings_of(key["preset"], key["lengths"], root / "model", root, options)
        config = build_config(merge(quickstart_adam(), changes))
        directory = RunDirectory.create(config)
        supervise(config, directory, split_of_this_machine(config))
        lines = read_metrics(directory.metrics_file)
    return row_of(config.schedule.updates_per_batch, options.warm_up, lines)


def row_of(updates: int, warm_up: int, lines: Sequence[Row]) -> Row:
    """Return the means of a run's metrics without the first `warm_up` updates.

    Times and tokens are per optimizer step. Each line of metrics describes `updates` steps.
    """
    lines = lines[warm_up // updates :]

    def mean(name: str) -> float:
        return float(np.mean([line[name] for line in lines]))

    return {
        "trained_tokens": mean("train/trained_tokens") / updates,
        "rollout_seconds": mean("rollout/seconds") / updates,
        "step_seconds": mean("time/step") / updates,
        "slots_idle": 1 - mean("rollout/slots_busy_share"),
        "trainer_idle": mean("time/wait_for_batch") / mean("time/step"),
        "resumed": mean("rollout/resumed_share"),
        "lag_mean": mean("rollout/lag_mean"),
        "lag_max": max(line["rollout/lag_max"] for line in lines),
    }


def per_rollout_second(row: Row) -> float:
    """Return the trained tokens per second in which requests may run."""
    return float(row["trained_tokens"] / row["rollout_seconds"])


def per_second(row: Row) -> float:
    """Return the trained tokens per second of the run."""
    return float(row["trained_tokens"] / row["step_seconds"])


def time_table(rows: Sequence[Row]) -> str:
    """Return a table with medians and ranges; ratios are relative to `sync` of the repetition."""
    header = (
        "lengths | schedule | runs | trained tokens/step | trained tokens/rollout s | x sync "
        "| trained tokens/s | x sync | rollout s/step | whole s/step "
        "| slots idle | trainer idle | resumed | lag mean / max"
    )
    lines, void = [], []
    sync = {(r["lengths"], r["repetition"]): r for r in rows if r["preset"] == "sync"}
    for lengths, preset in dict.fromkeys((r["lengths"], r["preset"]) for r in rows):
        of = [r for r in rows if (r["lengths"], r["preset"]) == (lengths, preset)]
        bases = [(sync.get((lengths, row["repetition"])), row) for row in of]
        pairs = [(base, row) for base, row in bases if base is not None]
        ratios = [per_rollout_second(row) / per_rollout_second(base) for base, row in pairs]
        whole = [per_second(row) / per_second(base) for base, row in pairs]
        ratio = spread(ratios)
        apart = (max(ratios) - min(ratios)) / float(np.median(ratios)) if ratios else 0.0
        if apart > MAX_SPREAD:
            ratio = f"void: {ratio}"
            void.append(
                f"**Void**: the pairs of `{preset}` on `{lengths}` spread by {apart:.0%} of their "
                f"median, and at most {MAX_SPREAD:.0%} counts. Measure again on a quiet machine."
            )
        shares = [
            f"{np.median([row[name] for row in of]):.0%}"
            for name in ("slots_idle", "trainer_idle", "resumed")
        ]
        lag = float(np.median([row["lag_mean"] for row in of]))
        lines.append(
            [
                lengths,
                preset,
                len(of),
                spread([row["trained_tokens"] for row in of], 0),
                spread([per_rollout_second(row) for row in of], 0),
                ratio,
                spread([per_second(row) for row in of], 0),
                spread(whole),
                spread([row["rollout_seconds"] for row in of]),
                spread([row["step_seconds"] for row in of]),
                *shares,
                f"{lag:.2f} / {max(row['lag_max'] for row in of):.0f}",
            ]
        )
    return "\n\n".join([table(header, lines), *void])


def describe_lengths(longest: int) -> str:
    """Return the forced lengths in one line."""
    tail = np.array(forced_lengths("tail", 4096, longest))
    uniform = forced_lengths("uniform", 4096, longest)[0]
    return (
        f"Forced lengths: `tail` has median {np.median(tail):.0f}, mean {tail.mean():.0f}, "
        f"99 % quantile {np.quantile(tail, 0.99):.0f}, longest {tail.max()} tokens; "
        f"`uniform` {uniform}."
    )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--lengths", nargs="*", default=["tail", "uniform"])
    parser.add_argument("--warm-up", type=int, default=12, help="updates that are not measured")
    parser.add_argument("--steps", type=int, default=24, help="measured updates of each run")
    parser.add_argument("--groups", type=int, default=4, help="B, number of groups of 8 per update")
    parser.add_argument(
        "--concurrency", type=int, default=32, help="N' of schedules other than sync and rapid"
    )
    parser.add_argument("--longest", type=int, default=1024, help="longest response, tokens")
    parser.add_argument("--repetitions", type=int, default=5)
    piece_options(parser, "schedules")
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
    return parser.parse_args(arguments)


def pieces(options: argparse.Namespace) -> list[Row]:
    """Return the keys of all runs, in the order in which they are made."""
    sizes = {name: getattr(options, name) for name in SIZES}
    return [
        {"repetition": repetition, "lengths": kind, "preset": preset, "sizes": sizes}
        for repetition in range(options.repetitions)
        for kind in options.lengths
        for preset in options.presets
    ]


def recorded(options: argparse.Namespace) -> list[Row]:
    """Return the rows that were made with the sizes of `options`.

    Rows of 2026 also have other sizes, because this program then also made trainings.
    """
    wanted = {name: getattr(options, name) for name in SIZES}
    rows = [row for row in read(options.rows) if wanted.items() <= row["sizes"].items()]
    return [{**row, "sizes": wanted} for row in rows]


def main() -> None:
    options = parsed()
    make_missing(pieces(options), recorded(options), options, lambda key: measure(key, options))
    text = "\n\n".join([describe_lengths(options.longest), time_table(recorded(options))])
    publish("benchmarks.schedules", "Schedules on the real engine", text, options.out)


if __name__ == "__main__":
    main()

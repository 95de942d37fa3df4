"""The trainer alone: tokens/s of this system's SFT step, transformers' Trainer and a plain loop.

    python -m benchmarks.trainer_alone                # three rounds: four minutes when quiet
    python -m benchmarks.trainer_alone --rounds 1

The quickstart's model, its worked answers, batches of 64, AdamW, float32, one process with one
thread: the cost of a step itself. Every system trains on the same batches in the same order; the
losses of the first and the last step are in the rows, so that a reader can check that the work is
the same. Tokens are those of the sequences, padding not counted (this system packs,
the others pad each batch to its longest sequence). The systems alternate; each ratio is of one
round. transformers' Trainer needs `accelerate`, so it and the plain loop run in TRL's environment
(versus_trl.py makes it).
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
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import command_line
from benchmarks.quickstart_adam import quickstart_adam
from benchmarks.rows import Row, append, read, spread
from benchmarks.versus_trl import ROOT, trl_environment
from megatron_async.config import build_config
from megatron_async.config.load import merge
from megatron_async.engines.nodes import free_port
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.tasks import build_task

OURS = "megatron_async"
SYSTEMS = (OURS, "transformers Trainer", "plain torch loop")
_WARM_UP = 4
_LIMIT_SECONDS = 600


def piece(system: str, scratch: Path, environment: Path, steps: int) -> Row:
    """One system trains on all batches, in a process of its own."""
    job = scratch / "job.json"
    if not job.exists():
        job.write_text(json.dumps(make_job(scratch, steps)))
    python = Path(sys.executable) if system == OURS else trl_environment(environment)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if system == OURS:  # Trainer would take them for a distributed run
        own |= {**rank, "MASTER_PORT": str(free_port())}
    subprocess.run(
        [str(python), "-m", "benchmarks.trainer_alone_worker", system, str(job)],
        check=True,
        cwd=ROOT,
        timeout=_LIMIT_SECONDS,
        env={**os.environ, **own},
    )
    found: Row = json.loads((scratch / "found.json").read_text())
    seconds, tokens = found["step_seconds"][_WARM_UP:], found["tokens"][_WARM_UP:]
    rate = statistics.median(n / s for n, s in zip(tokens, seconds, strict=True))
    return {"system": system, "tokens_per_second": rate, "losses": found["losses"]}


def make_job(scratch: Path, steps: int) -> Row:
    """The model and the batches."""
    model = scratch / "model"
    build_tiny_model(model, seed=1)
    own = {"model": {"path": str(model)}, "parallel": {"ranks": 1, "tensor": 1}}
    config = build_config(merge(quickstart_adam(), own))
    examples = build_task(config.task, str(model)).worked_examples(64 * (steps + _WARM_UP))
    listed = [[e.prompt_ids.tolist(), e.response_ids.tolist()] for e in examples]
    return {
        "config": config.model_dump(mode="json"),
        "batches": [listed[start : start + 64] for start in range(0, len(listed), 64)],
        "out": str(scratch / "found.json"),
        "work": str(scratch / "trainer"),
    }


def table(rows: Sequence[Row]) -> str:
    """Markdown: rates, and this system's over the others' in the same round."""
    rounds: dict[int, dict[str, Row]] = {}
    for row in rows:
        rounds.setdefault(row["round"], {})[row["system"]] = row
    out = [
        "| one rank, one thread | rounds | tokens/s | megatron_async against it "
        "| loss of first and last step |",
        "|---|--:|--:|--:|--:|",
    ]
    for system in SYSTEMS:
        own = [both[system] for both in rounds.values() if system in both]
        ratios = [
            both[OURS]["tokens_per_second"] / both[system]["tokens_per_second"]
            for both in rounds.values()
            if OURS in both and system in both
        ]
        if own:
            first, last = own[-1]["losses"][0], own[-1]["losses"][-1]
            out.append(
                f"| {system} | {len(own)} | {spread([r['tokens_per_second'] for r in own], 0)} "
                f"| {spread(ratios)} | {first:.4f}, {last:.4f} |"
            )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each")
    parser.add_argument("--environment", type=Path, default=ROOT / "runs" / "versus_trl-env")
    parser.add_argument(
        "--rows", type=Path, default=ROOT / "benchmarks/results/trainer_alone.jsonl"
    )
    parser.add_argument("--out", type=Path, help="write the table here, too")
    options = parser.parse_args()
    before = 1 + max((row["round"] for row in read(options.rows)), default=-1)
    with tempfile.TemporaryDirectory(prefix="trainer-alone-") as name:
        for number in range(before, before + options.rounds):
            for system in SYSTEMS:
                row = piece(system, Path(name), options.environment, options.steps)
                append(options.rows, {"round": number, **row, "date": f"{datetime.date.today()}"})
                print(system, round(row["tokens_per_second"]), file=sys.stderr, flush=True)
    text = table(read(options.rows))
    print(text)
    if options.out is not None:
        command = command_line("benchmarks.trainer_alone")
        options.out.write_text(f"`{command}`, {datetime.date.today()}\n\n{text}\n")


if __name__ == "__main__":
    main()

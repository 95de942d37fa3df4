"""How long a file of many rows takes to start from, and what memory it holds.

    python -m benchmarks.rows_on_disk [--rows 1000000]

A JSONL file of questions and answers of about 120 bytes a row, with the quickstart's tokenizer. The
first start reads every row once; the second finds the index that the first has kept. Memory is what
a process has more after its prompts are drawn than before the task is built.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_async.config import build_config
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.tasks import build_task


def write_rows(path: Path, count: int) -> None:
    """Sums that differ, in a file of JSONL."""
    rng = random.Random(1)
    with path.open("w") as file:
        for number in range(count):
            a, b = rng.randrange(10**6), rng.randrange(10**6)
            question = f"What is {a} + {b}? Answer with the number alone. (problem {number})"
            file.write(json.dumps({"question": question, "answer": str(a + b)}) + "\n")


def memory_mib() -> float:
    """Resident, of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def start(directory: Path, rows: int) -> None:
    """Build the task and draw prompts at both ends of an epoch; prints a row of the table."""
    columns = {"prompt": "question", "answer": "answer"}
    task = {"kind": "files", "path": str(directory / "rows.jsonl"), "columns": columns}
    model = {"path": str(directory / "model")}
    config = build_config({"name": "rows", "model": model, "task": task, "reward": "exact"})
    before, began = memory_mib(), time.perf_counter()
    problems = build_task(config.task, config.model.path, config.eval)
    built = time.perf_counter()
    problems.train_prompts(0, 64)
    problems.train_prompts(rows * 9 // 10, 64)
    drawn = time.perf_counter()
    print(f"| {built - began:.1f} s | {drawn - built:.2f} s | {memory_mib() - before:.0f} MiB |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start is not None:
        start(options.start, options.rows)
        return
    with tempfile.TemporaryDirectory(prefix="rows-") as name:
        directory = Path(name)
        build_tiny_model(directory / "model", seed=1)
        write_rows(directory / "rows.jsonl", options.rows)
        size = (directory / "rows.jsonl").stat().st_size / 2**20
        print(f"{options.rows:,} rows, {size:.0f} MiB")
        print("| task built | 128 prompts at two places | memory |\n|---|---|---|", flush=True)
        command = [sys.executable, "-m", "benchmarks.rows_on_disk", "--start", name]
        command += ["--rows", str(options.rows)]
        environment = {**os.environ, "XDG_CACHE_HOME": name}  # the first start finds no index
        for _ in range(2):
            subprocess.run(command, check=True, env=environment, timeout=600)


if __name__ == "__main__":
    main()

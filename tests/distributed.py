"""Runs a module-level function on n gloo ranks, with a hard time limit, and returns the results.

    results = run_ranks(check_layouts, 4, model_dir, timeout_seconds=90)

`check_layouts(model_dir)` runs in every rank with the environment that torchrun would set (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Therefore
`torch.distributed.init_process_group("gloo")` works as in a job.

Invariants
- Ranks are forked from one server process for each test session, which has already imported torch,
  megatron, transformers and the trainer. The import happens once, and a launch takes a fraction of
  a second. Many checks in one launch are still faster than many launches.
- No rank survives the call. The first rank that fails ends the other ranks; its traceback is the
  error.
- No port is fixed: the parent holds the rendezvous store on a port that the kernel has chosen.
- Results are pickled (tensors by value; nothing is shared with a process that has ended).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed",
    "safetensors.torch",
    "megatron.core.parallel_state",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron_async.train_loop.loop",
    "megatron_async.trainer.step",
    "megatron_async.weight_sync.publisher",
    "tests.trainer.cases",
]
_OUTPUT_TAIL = 4000


class RankFailure(AssertionError):
    """Raised when a rank raises, dies or exceeds the time limit; contains the rank's traceback and
    output."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120.0,
    method: str = "forkserver",
) -> list[Any]:
    """Run `function(*args)` in each rank and return the results by rank; `function` and `args` must
    be picklable.

    Args:
        method: Start method of the ranks. With `fork`, ranks have the imports of this process,
            which must not have started threads.

    Raises:
        RankFailure: One rank failed, or `timeout_seconds` have passed.
    """
    import torch.distributed as dist

    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, args, rank, world_size, store.port, folder, timeout_seconds),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait_for_all(processes, Path(folder), timeout_seconds)
            return [
                pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes())
                for rank in range(world_size)
            ]
        finally:
            for process in processes:
                if process.pid is not None and process.is_alive():
                    process.kill()
                    process.join(10)


def _wait_for_all(processes: list[Any], folder: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            late = sorted(running.values())
            raise RankFailure(
                f"ranks {late} were still running after {timeout_seconds} s\n"
                + "\n".join(_output(folder, rank) for rank in late)
            )
        failed = []
        for sentinel in ended:
            rank = running.pop(sentinel)  # type: ignore[call-overload]
            processes[rank].join(10)
            if processes[rank].exitcode != 0:
                failed.append(rank)
        if failed:
            rank = _first_to_fail(folder, len(processes), failed)
            raise RankFailure(
                f"rank {rank} of {len(processes)} failed (exit code "
                f"{processes[rank].exitcode})\n{_output(folder, rank)}"
            )


def _first_to_fail(folder: Path, world_size: int, failed: list[int]) -> int:
    """Return the rank whose error was written first, because other ranks often fail as a
    consequence."""
    written = [
        (path.stat().st_mtime_ns, rank)
        for rank in range(world_size)
        if (path := folder / f"{rank}.error").exists()
    ]
    return min(written)[1] if written else failed[0]


def _output(folder: Path, rank: int) -> str:
    parts = [f"--- rank {rank} ---"]
    for suffix in ("error", "log"):
        path = folder / f"{rank}.{suffix}"
        if path.exists():
            parts.append(path.read_text(errors="replace")[-_OUTPUT_TAIL:])
    return "\n".join(parts)


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    timeout_seconds: float,
) -> None:
    """Run one rank: set its environment, redirect its output to a file, run the function, and write
    the result to a file."""
    base = Path(folder)
    log = (base / f"{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    faulthandler.dump_traceback_later(max(1.0, timeout_seconds - 2.0), file=log)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        result = pickle.dumps(function(*args))
    except BaseException:  # noqa: BLE001 - every failure of a rank is reported to the parent
        (base / f"{rank}.error").write_text(traceback.format_exc())
        log.flush()
        os._exit(1)
    (base / f"{rank}.pickle").write_bytes(result)
    log.flush()
    # A normal exit may crash in Gloo's threads during shutdown; the result is already on disk.
    os._exit(0)

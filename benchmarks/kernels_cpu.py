"""Measures peak memory and time of the chunked head and of full logits on the CPU.

Each measurement runs in a separate process. The process resets its peak resident memory just before
the measured part (`/proc/self/clear_refs`) and reads it afterward (`VmHWM`), so that earlier
allocations do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.reporting import ROOT, table

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One forward and backward pass of the head: its implementation (`mode`) and its shape."""

    mode: str
    tokens: int
    vocab: int
    hidden: int
    workspace_mib: int = 256


@dataclass(frozen=True)
class Measured:
    """Result of a measurement.

    Attributes:
        extra_mib: MiB of peak resident memory in addition to the inputs and the two gradients.
        seconds: Duration.
    """

    extra_mib: float
    seconds: float


def run_case(case: Case, *, timeout_seconds: float = 280.0) -> Measured:
    """Measure `case` in a new process.

    Raises:
        subprocess.CalledProcessError: The process failed.
    """
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels_cpu", json.dumps(asdict(case))],
        check=True,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    return Measured(**json.loads(finished.stdout.splitlines()[-1]))


def measure(case: Case) -> Measured:
    """Measure one forward and backward pass in this process.

    The tensors of the results are allocated before the peak memory is reset.
    """
    import torch
    from megatron_async_kernels import reference_token_logprob, token_logprob

    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(case.tokens, case.hidden, generator=generator).requires_grad_()
    weight_VD = torch.randn(case.vocab, case.hidden, generator=generator)
    targets_T = torch.randint(0, case.vocab, (case.tokens,), generator=generator)
    weight_VD.requires_grad_()
    main_grad_VD = torch.zeros_like(weight_VD)

    def step(rows: int) -> None:
        if case.mode == "chunked":
            logprobs_T = token_logprob(
                hidden_TD[:rows],
                weight_VD,
                targets_T[:rows],
                weight_grad_out=main_grad_VD,
                backend="chunked",
                workspace_bytes=case.workspace_mib * MIB,
            )
            assert isinstance(logprobs_T, torch.Tensor)
        else:
            logprobs_T, _ = reference_token_logprob(hidden_TD[:rows], weight_VD, targets_T[:rows])
        logprobs_T.sum().backward()

    if case.mode == "chunked":
        step(8)
    hidden_TD.grad = torch.zeros_like(hidden_TD)
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    start = time.perf_counter()
    step(case.tokens)
    seconds = time.perf_counter() - start
    # Autograd creates a new dHidden and adds it to `grad`. With full logits, it also creates a new
    # dWeight.
    results = 4 * case.tokens * case.hidden
    if case.mode != "chunked":
        results += 4 * case.vocab * case.hidden
    return Measured((_memory("VmHWM") - before - results) / MIB, seconds)


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {field}")


def memory_table(shapes: list[tuple[int, int, int]], workspace_mib: int) -> str:
    """Return a table that compares chunked and full logits.

    Full logits are measured only if they take less than 1 GiB.
    """
    header = (
        f"T | V | D | one copy of the logits (MiB) | chunked, workspace {workspace_mib} MiB: "
        "extra MiB | s | full logits: extra MiB | s"
    )
    rows = []
    for tokens, vocab, hidden in shapes:
        mine = run_case(Case("chunked", tokens, vocab, hidden, workspace_mib))
        cells = [f"{mine.extra_mib:.0f}", f"{mine.seconds:.1f}"]
        if 4 * tokens * vocab < 2**30:
            full = run_case(Case("full", tokens, vocab, hidden, workspace_mib))
            cells += [f"{full.extra_mib:.0f}", f"{full.seconds:.1f}"]
        else:
            cells += ["not run", "not run"]
        rows.append([tokens, vocab, hidden, 4 * tokens * vocab // MIB, *cells])
    return table(header, rows)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Case(**json.loads(sys.argv[1]))))))

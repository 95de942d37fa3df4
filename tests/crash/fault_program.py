"""Injects random sequences of faults into runs and checks the evidence that each run leaves.

`python -m tests.crash.fault_program --faults 500 --seed 1 [--episodes] [--only N]`

Faults are defined in `faults.py`, runs in `world.py` and checks in `checks.py`. The command prints
a table. If a promise was broken, it also prints the command that repeats the sequence, and the exit
code is 1. A C compiler is required, for a disk and a clock that can fail.

If this machine blocked the event loops of a run for too long, the run is not evidence about its
engines. Such a run is repeated at the end. If the repetition is too slow as well, it is counted as
set aside.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.checks import CHECKS
from tests.crash.disk import Edges, build_library
from tests.crash.faults import KINDS, Fault, kinds_at, sequence
from tests.crash.processes import PROCESS_KINDS, suffer_in_processes
from tests.crash.world import Result, episode_settings, settings, suffer

PRESETS = ("sync", "rapid", "copris", "pipeline", "async")
ON_SCORER_FAILURE = ("zero", "drop")
_FAULTS_OF_A_RUN = 13
# "trainer pauses for long" tests a stop in the middle of a weight transfer. The made-up trainer of
# runs in one process cannot be stopped there.
_NOT_THERE = ("trainer pauses for long", *kinds_at("environment"))
_IN_ONE_PROCESS = tuple(name for name in KINDS if name not in _NOT_THERE)
_OF_EPISODES = (
    *(name for name in _IN_ONE_PROCESS if name not in kinds_at("scorer")),
    *kinds_at("environment"),
)
_HEALTHY = "healthy engines given up"


@dataclass(frozen=True)
class Plan:
    """One sequence of faults and the preset of the run that suffers them."""

    number: int
    seed: str
    preset: str
    faults: tuple[Fault, ...]

    @classmethod
    def of(
        cls,
        seed: int,
        number: int,
        preset: str | None,
        count: int,
        kinds: Collection[str] = _IN_ONE_PROCESS,
    ) -> Plan:
        """Draw the sequence `number` of a program.

        The result depends only on the arguments, not on sequences that were drawn before.

        Args:
            seed: Seed of the program.
            number: Number of the sequence.
            preset: Preset of the run; None alternates between `PRESETS`.
            count: Number of faults.
            kinds: Names of the kinds that are drawn.
        """
        own, usual = f"{seed}.{number}", PRESETS[number % len(PRESETS)]
        return cls(number, own, preset or usual, sequence(own, count, kinds))


@dataclass
class Account:
    """Results of all runs of one preset."""

    results: list[Result] = field(default_factory=list)
    set_aside: int = 0

    def broken(self) -> list[str]:
        return [sentence for result in self.results for sentence in result.broken]


def is_due_to_a_slow_machine(result: Result) -> bool:
    """Return whether a slow machine explains every broken promise of `result`.

    A slow machine explains only that healthy engines were replaced.
    """
    return bool(result.slow and result.broken) and all(
        sentence.startswith(_HEALTHY) for sentence in result.broken
    )


def in_one_process(plan: Plan, folder: Path, edges: Edges | None, *, has_episodes: bool) -> Result:
    """Carry out `plan` in this process, with simulated engines and a trainer without a model.

    Args:
        plan: The sequence of faults.
        folder: The run's directory.
        edges: Control of the disk and the clock; None if they cannot fail.
        has_episodes: Whether the trajectories are episodes.
    """
    if has_episodes:
        config = episode_settings(plan.preset, folder)
    else:
        failure = ON_SCORER_FAILURE[plan.number % len(ON_SCORER_FAILURE)]
        config = settings(plan.preset, task={"on_scorer_timeout": failure})
    return asyncio.run(
        suffer(
            folder,
            config,
            plan.faults,
            seed=plan.seed,
            edges=edges,
            scorer_processes=any(KINDS[fault.kind].edge == "scorer" for fault in plan.faults),
        )
    )


def table(accounts: dict[str, Account]) -> str:
    """Format a table of the faults by kind and preset, and a table of the results by preset."""
    kinds = {preset: Counter[str]() for preset in accounts}
    for preset, account in accounts.items():
        for result in account.results:
            kinds[preset].update(one.kind for one in result.injected)
    lines = ["| fault | " + " | ".join(accounts) + " |", "|---" * (len(accounts) + 1) + "|"]
    for kind in KINDS:
        lines.append(f"| {kind} | " + " | ".join(str(kinds[p][kind]) for p in accounts) + " |")
    lines.append("| all | " + " | ".join(str(sum(kinds[p].values())) for p in accounts) + " |")
    heads = ["preset", "runs", "set aside", "resumed", "trajectories", "batches", "largest lag"]
    lines += ["", "| " + " | ".join([*heads, *CHECKS, "runs that stopped"]) + " |"]
    lines.append("|---" * (len(heads) + len(CHECKS) + 1) + "|")
    for preset, account in accounts.items():
        results, broken = account.results, account.broken()
        cells: list[object] = [preset, len(results), account.set_aside]
        cells += [sum(r.resumes for r in results), sum(r.trajectories for r in results)]
        cells += [sum(r.batches for r in results), max((r.largest_lag for r in results), default=0)]
        cells += [sum(line.startswith(f"{name}: ") for line in broken) for name in CHECKS]
        known = tuple(f"{name}: " for name in CHECKS)
        cells.append(sum(not line.startswith(known) for line in broken))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _report(result: Result, plan: Plan, command: str) -> None:
    print(
        f"{plan.number} {plan.preset}: {len(result.injected)} faults, {result.seconds:.1f} s, "
        f"{len(result.broken)} broken promises",
        flush=True,
    )
    if not result.broken:
        return
    print(f"  repeat it with: {command} --only {plan.number}")
    for one in result.injected:
        print(f"  {one.at:6.2f} s {one.kind} {one.engine} x{one.count}")
    for why, at in result.reasons.items():
        print(f"  {at:6.2f} s the run: {why}")
    for sentence in result.broken:
        print(f"  BROKEN {sentence}", flush=True)


def program(
    plans: Sequence[Plan],
    root: Path,
    carry_out: Callable[[Plan, Path], Result],
    command: str,
    seconds: float,
) -> dict[str, Account]:
    """Carry out plans one after the other, and repeat a run once if the machine was too slow.

    Args:
        plans: Plans in order.
        root: Directory in which each run gets a folder.
        carry_out: Carries out a plan in a folder.
        command: Command that repeats the program; it is printed with each failure.
        seconds: Time after which no further run is started.

    Returns:
        The results by preset.
    """
    accounts = {preset: Account() for preset in dict.fromkeys(plan.preset for plan in plans)}
    began = time.monotonic()
    waiting = [(plan, 0) for plan in plans]
    while waiting and time.monotonic() - began < seconds:
        plan, tries = waiting.pop(0)
        folder = root / f"{plan.number}.{tries}"
        result = carry_out(plan, folder)
        _report(result, plan, command)
        account = accounts[plan.preset]
        if not is_due_to_a_slow_machine(result):
            account.results.append(result)
        elif tries:
            account.set_aside += 1
        else:
            waiting.append((plan, 1))
    return accounts


def _with_edges(arguments: list[str], root: Path) -> None:
    """Replace this process with one that preloads `edges.c`, for files below `root`."""
    root.mkdir(parents=True, exist_ok=True)
    library = build_library(root)
    environment = Edges(root / "page").environment(library, root)
    os.execve(
        sys.executable,
        [sys.executable, "-m", "tests.crash.fault_program", *arguments, "--keep", str(root)],
        environment,
    )


def main(arguments: list[str]) -> int:
    """Run the fault program; return exit code 0 if every promise was kept and 1 otherwise."""
    parser = argparse.ArgumentParser(prog="tests.crash.fault_program", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--engine",
        choices=("simulated", "sglang"),
        default=None,
        help="start whole runs in processes with these engines; default: run in this process",
    )
    parser.add_argument(
        "--cluster", choices=("local", "ray"), default="local", help="backend of whole runs"
    )
    parser.add_argument(
        "--episodes", action="store_true", help="train on episodes of an environment that fails"
    )
    parser.add_argument("--faults-of-a-run", type=int, default=_FAULTS_OF_A_RUN)
    parser.add_argument("--preset", choices=PRESETS, default=None)
    parser.add_argument("--only", type=int, default=None, help="run only this sequence")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--out", type=Path, default=None, help="file to write the table to")
    parser.add_argument(
        "--keep", type=Path, default=None, help="directory in which the runs are kept"
    )
    parsed = parser.parse_args(arguments)
    edges = Edges.of_this_process()
    if edges is None and parsed.engine is None:
        root = parsed.keep or Path(tempfile.mkdtemp(prefix="faults-"))
        _with_edges(arguments, root.absolute())
    root = parsed.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    # aiohttp would log every stream that an engine breaks on purpose.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    command = f"python -m tests.crash.fault_program --faults {parsed.faults}"
    if parsed.engine:
        command += f" --engine {parsed.engine} --faults-of-a-run {parsed.faults_of_a_run}"
    command += " --episodes" if parsed.episodes else ""
    command += " --cluster ray" if parsed.cluster == "ray" else ""
    command += f" --seed {parsed.seed}" + (f" --preset {parsed.preset}" if parsed.preset else "")
    each = parsed.faults_of_a_run
    numbers = range(-(-parsed.faults // each))
    if parsed.only is not None:
        numbers = range(parsed.only, parsed.only + 1)
    kinds = _OF_EPISODES if parsed.episodes else _IN_ONE_PROCESS
    kinds = kinds if parsed.engine is None else PROCESS_KINDS
    plans = [
        Plan.of(parsed.seed, number, parsed.preset, min(each, parsed.faults - each * number), kinds)
        for number in numbers
    ]

    def carry_out(plan: Plan, folder: Path) -> Result:
        if parsed.engine is None:
            return in_one_process(plan, folder, edges, has_episodes=parsed.episodes)
        return suffer_in_processes(
            plan.preset,
            parsed.engine,
            root,
            folder.name,
            plan.seed,
            plan.faults,
            parsed.cluster,
        )

    began = time.monotonic()
    accounts = program(plans, root, carry_out, command, parsed.seconds)
    text = f"`{command}`, {time.monotonic() - began:.0f} s\n\n{table(accounts)}\n"
    broken = [line for account in accounts.values() for line in account.broken()]
    if broken:
        text += "\nBroken promises:\n\n" + "\n".join(f"- {line}" for line in broken) + "\n"
    print(text)
    if parsed.out is not None:
        parsed.out.write_text(text)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

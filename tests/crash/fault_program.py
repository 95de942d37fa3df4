"""`python -m tests.crash.fault_program --faults 500 --seed 1 [--episodes] [--only N]`

Random sequences of faults (`faults.py`) done to runs (`world.py`), each run audited by what it has
left behind (`checks.py`). Prints a table; exit code 1 if a promise was broken, with the command
that repeats the sequence. Needs a C compiler for a disk and a clock that fail.

A run on a machine that stood still for too long is repeated at the end, as it is no
evidence about its engines; it is counted as set aside if it was too slow again.
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
# A made-up trainer cannot be stopped in the middle of a transfer, for which that kind is.
_NOT_THERE = ("trainer pauses for long", *kinds_at("environment"))
_IN_ONE_PROCESS = tuple(name for name in KINDS if name not in _NOT_THERE)
_OF_EPISODES = (
    *(name for name in _IN_ONE_PROCESS if name not in kinds_at("scorer")),
    *kinds_at("environment"),
)
_HEALTHY = "healthy engines given up"


@dataclass(frozen=True)
class Plan:
    """One sequence of a program."""

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
        """The same for the same numbers, whatever came before."""
        own, usual = f"{seed}.{number}", PRESETS[number % len(PRESETS)]
        return cls(number, own, preset or usual, sequence(own, count, kinds))


@dataclass
class Account:
    """Results of one preset."""

    results: list[Result] = field(default_factory=list)
    set_aside: int = 0

    def broken(self) -> list[str]:
        return [sentence for result in self.results for sentence in result.broken]


def is_due_to_a_slow_machine(result: Result) -> bool:
    """Whether all that is wrong is what a machine that stands still explains."""
    return bool(result.slow and result.broken) and all(
        sentence.startswith(_HEALTHY) for sentence in result.broken
    )


def in_one_process(plan: Plan, folder: Path, edges: Edges | None, *, has_episodes: bool) -> Result:
    """A run whose engines are threads' and whose trainer is made up; `plays`: of episodes."""
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
    """Faults by kind and preset, then what was counted."""
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
    """Carry them out, one after the other, as many as begin within `seconds`."""
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
    """This process anew, with the library preloaded and files below `root` on the disk."""
    root.mkdir(parents=True, exist_ok=True)
    library = build_library(root)
    environment = Edges(root / "page").environment(library, root)
    os.execve(
        sys.executable,
        [sys.executable, "-m", "tests.crash.fault_program", *arguments, "--keep", str(root)],
        environment,
    )


def main(arguments: list[str]) -> int:
    """Exit code: 0 when every promise was kept."""
    parser = argparse.ArgumentParser(prog="tests.crash.fault_program", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--engine",
        choices=("simulated", "sglang"),
        default=None,
        help="whole runs in processes of their own, with these engines; default: in one process",
    )
    parser.add_argument(
        "--cluster", choices=("local", "ray"), default="local", help="of whole runs"
    )
    parser.add_argument("--episodes", action="store_true", help="of an environment, which fails")
    parser.add_argument("--faults-of-a-run", type=int, default=_FAULTS_OF_A_RUN)
    parser.add_argument("--preset", choices=PRESETS, default=None)
    parser.add_argument("--only", type=int, default=None, help="this sequence alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after these")
    parser.add_argument("--out", type=Path, default=None, help="file for the table")
    parser.add_argument("--keep", type=Path, default=None, help="directory for the runs")
    parsed = parser.parse_args(arguments)
    edges = Edges.of_this_process()
    if edges is None and parsed.engine is None:
        root = parsed.keep or Path(tempfile.mkdtemp(prefix="faults-"))
        _with_edges(arguments, root.absolute())
    root = parsed.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # the engines' own broken streams
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

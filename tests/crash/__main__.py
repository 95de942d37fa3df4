"""Kills training runs at random moments and checks that no promised trajectory or token is lost.

`python -m tests.crash --engine simulated --kills 200 --seed 1 [--episodes | --agents]
[--cluster ray] [--out FILE]`
`python -m tests.crash --engine sglang --kills 50 --during-verification`

Each run is `megatron-async train` with a tiny model. The command kills single processes of the run
and its whole process tree, lets the run continue to its end, and then checks every trajectory and
token (`checks.py`). It prints a table. The exit code is 1 if a promise was broken or a run did not
continue.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.checks import CHECKS, audit, tokens_lost
from tests.crash.episodes import repeats, went_on
from tests.crash.ledger import SLOW_VARIABLE
from tests.crash.run import (
    PARTS,
    PARTS_OF_EPISODES,
    TARGETS,
    Kill,
    RunFailed,
    RunUnderFire,
    Target,
    configuration,
    of_agents,
    of_episodes,
    prepare,
    rules_of,
)

PRESETS = ("copris", "pipeline", "async")
_IMPATIENT = 0.15
_LONGEST_DELAY_SECONDS = 1.5
_KILLS_OF_A_RUN = 17
# With --during-verification, each verification is delayed by so many seconds, and each kill comes
# within this time.
_VERIFICATION_SECONDS = 1.0


@dataclass
class Account:
    """Kills and results of all runs of one preset."""

    kills: dict[Target, list[Kill]] = field(default_factory=lambda: defaultdict(list))
    largest_loss: dict[Target, int] = field(default_factory=lambda: defaultdict(int))
    broken: list[str] = field(default_factory=list)
    trajectories: int = 0
    batches: int = 0
    largest_lag: int = 0
    repeats: int = 0
    went_on: int = 0
    open_at_kills: int = 0


def plan_of_kills(rng: random.Random, kills: int, parts: Iterator[Target]) -> list[Target]:
    """Return the targets of a run's kills in random order.

    Every tenth kill and the last kill hit the whole process tree. The other kills hit the next
    items of `parts`.
    """
    plan: list[Target] = ["tree" if i % 10 == 9 else next(parts) for i in range(kills - 1)]
    rng.shuffle(plan)
    return [*plan, "tree"]


def one_run(
    run: RunUnderFire, plan: list[Target], account: Account, during_verification: bool = False
) -> None:
    """Start a run, kill the targets of `plan`, let the run end, and add the result to `account`.

    With `during_verification`, each kill comes while an update of the engines' weights is not
    verified yet and the trainer trains or waits for a batch.

    Failures and broken promises are recorded in `account.broken`.
    """
    rng = run.rng
    try:
        run.start()
        for number, target in enumerate(plan):
            if during_verification:
                run.wait_for_verification()
                time.sleep(rng.uniform(0, _VERIFICATION_SECONDS / 2))
            else:
                time.sleep(rng.uniform(0, _LONGEST_DELAY_SECONDS))
            if number < len(plan) - 1:
                run.kill(target, patient=rng.random() > _IMPATIENT)
        run.last_life(steps=2)
        run.wait_for_end()
    except RunFailed as failure:
        account.broken.append(f"{run.config['name']}: a run did not continue: {failure}")
        return
    finally:
        run.close()
        for kill in run.kills:
            account.kills[kill.target].append(kill)
    evidence = run.evidence()
    rules = rules_of(run.config)
    for name, found in audit(evidence, rules).items():
        account.broken += [f"{run.config['name']}: {name}: {sentence}" for sentence in found]
    account.trajectories += evidence.trajectories
    account.batches += len(evidence.batches)
    account.largest_lag = max([account.largest_lag, *(b.lag for b in evidence.batches)])
    account.repeats += repeats(evidence.calls)
    some, every = went_on(evidence.open_at, evidence.episodes)
    account.went_on, account.open_at_kills = account.went_on + some, account.open_at_kills + every
    for loss in tokens_lost(evidence):
        before = [kill for kill in run.kills if kill.arrivals <= loss.place]
        if not before:
            name = run.config["name"]
            account.broken.append(f"{name}: {loss.tokens} tokens were lost without a kill")
            continue
        cause = max(before, key=lambda kill: kill.arrivals).target
        account.largest_loss[cause] = max(account.largest_loss[cause], loss.tokens)


def table(accounts: dict[str, Account]) -> str:
    """Format the results as Markdown tables, with a row for each preset and target."""
    lines = [
        "| preset | killed | kills | seconds to the next step, median (max) "
        "| most tokens of a trajectory lost |",
        "|---|---|---|---|---|",
    ]
    for preset, account in accounts.items():
        for target in TARGETS:
            kills = account.kills.get(target, [])
            if not kills:
                continue
            times = sorted(k.recovered_seconds for k in kills if k.recovered_seconds)
            spread = f"{times[len(times) // 2]:.1f} ({times[-1]:.1f})" if times else "-"
            lost = account.largest_loss.get(target, 0)
            lines.append(f"| {preset} | {target} | {len(kills)} | {spread} | {lost} |")
    lines += ["", "| preset | trajectories | batches taken | largest lag | " + " | ".join(CHECKS)]
    lines[-1] += " | runs that stopped |"
    lines.append("|---" * (len(CHECKS) + 5) + "|")
    for preset, account in accounts.items():
        counts = [sum(f": {name}: " in line for line in account.broken) for name in CHECKS]
        stopped = sum("did not continue" in line for line in account.broken)
        cells = [preset, account.trajectories, account.batches, account.largest_lag]
        lines.append("| " + " | ".join(map(str, [*cells, *counts, stopped])) + " |")
    if any(account.open_at_kills or account.repeats for account in accounts.values()):
        lines += ["", "| preset | open at kills | continued | responses delivered again |"]
        lines.append("|---" * 4 + "|")
        for preset, account in accounts.items():
            # Runs of agents record no open episodes, because an agent's program starts again.
            known = account.open_at_kills
            cells = [preset, known or "-", account.went_on if known else "-", account.repeats]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the crash test; return exit code 0 if every promise was kept and 1 otherwise."""
    parser = argparse.ArgumentParser(prog="tests.crash", description=__doc__)
    parser.add_argument("--engine", choices=("simulated", "sglang"), default="simulated")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--preset", choices=PRESETS, default=None)
    parser.add_argument("--cluster", choices=("local", "ray"), default="local")
    parser.add_argument("--kills-of-a-run", type=int, default=_KILLS_OF_A_RUN)
    played = parser.add_mutually_exclusive_group()
    played.add_argument(
        "--episodes", action="store_true", help="train on episodes of an environment"
    )
    played.add_argument("--agents", action="store_true", help="train on episodes of an agent")
    parser.add_argument(
        "--during-verification",
        action="store_true",
        help="kill only while an update of the engines' weights is not verified yet",
    )
    parser.add_argument("--out", type=Path, default=None, help="file to write the table to")
    parser.add_argument(
        "--keep", type=Path, default=None, help="directory in which the runs are kept"
    )
    parsed = parser.parse_args(arguments)
    # An exception lets `one_run` end the processes of the current run.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    rng = random.Random(parsed.seed)
    presets = (parsed.preset,) if parsed.preset else PRESETS
    accounts = {preset: Account() for preset in presets}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crash-") as scratch:
        root = parsed.keep or Path(scratch)
        prepare(root)
        left, number = parsed.kills, 0
        # One cycle serves all runs, because a single run may be too short for every part.
        parts = itertools.cycle(PARTS_OF_EPISODES if parsed.episodes or parsed.agents else PARTS)
        while left > 0:
            preset = presets[number % len(presets)]
            count = min(parsed.kills_of_a_run, left)
            name = f"{preset}{number}"
            changes: dict[str, Any] = of_episodes(root, name) if parsed.episodes else {}
            changes = of_agents(root, name) if parsed.agents else changes
            changes["cluster"] = parsed.cluster
            config = configuration(preset, parsed.engine, root, name, changes)
            run = RunUnderFire(config, random.Random(rng.random()))
            if parsed.during_verification:
                run.environment[SLOW_VARIABLE] = str(_VERIFICATION_SECONDS)
            plan = plan_of_kills(run.rng, count, parts)
            one_run(run, plan, accounts[preset], parsed.during_verification)
            left, number = left - count, number + 1
            done = sum(len(k) for a in accounts.values() for k in a.kills.values())
            broken = sum(len(a.broken) for a in accounts.values())
            print(
                f"{time.monotonic() - began:.0f} s: {done} kills, {broken} broken promises",
                flush=True,
            )
            if parsed.out is not None:
                parsed.out.write_text(report(parsed, accounts, time.monotonic() - began))
    print(report(parsed, accounts, time.monotonic() - began))
    return 1 if any(account.broken for account in accounts.values()) else 0


def report(parsed: argparse.Namespace, accounts: dict[str, Account], seconds: float) -> str:
    """Return the command, the tables and every broken promise as Markdown."""
    command = f"python -m tests.crash --engine {parsed.engine} --kills {parsed.kills}"
    if parsed.kills_of_a_run != _KILLS_OF_A_RUN:
        command += f" --kills-of-a-run {parsed.kills_of_a_run}"
    if parsed.episodes:
        command += " --episodes"
    if parsed.agents:
        command += " --agents"
    if parsed.during_verification:
        command += " --during-verification"
    if parsed.preset is not None:
        command += f" --preset {parsed.preset}"
    if parsed.cluster != "local":
        command += f" --cluster {parsed.cluster}"
    broken = [line for account in accounts.values() for line in account.broken]
    text = f"`{command} --seed {parsed.seed}`, {seconds:.0f} s\n\n{table(accounts)}\n"
    if broken:
        text += "\nBroken promises:\n\n" + "\n".join(f"- {line}" for line in broken) + "\n"
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How busy engines are while episodes wait for tools, and what a turn costs the rollout manager.

    python -m benchmarks.slots [--seconds 30] [--out benchmarks/results/slots.md]

The rollout manager, its store and a worker process of environments are the real ones; two simulated
engines on a thread of their own answer over HTTP, 64 tokens a turn at 20 ms a step. Every episode
has eight turns. No batch is ever complete, so that nothing but turns goes on.

- busy: share of the time in which the N' slots are taken, over `--seconds` after the first episodes
  have ended.
- full rate: turns a second as a share of what N' slots that are always taken allow. It is below
  `busy` where engines or manager get too little of a core, as on a machine with other work.
- CPU: of the manager's process without the engines' thread, for each turn; it reads the streams
  itself, which in a run the hosts of engines do.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import logging
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.command import command_line
from benchmarks.crash.engines import EngineThread, FaultyLauncher
from benchmarks.papers.report import table
from megatron_async.config import RunConfig, build_config
from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.places.local import local_place
from megatron_async.rollout.manager import ResumePoint, RolloutManager
from megatron_async.scoring.interface import NoScorers
from megatron_async.tasks import build_task
from megatron_async.trajectory.types import PolicyVersion

TOKENS, STEP_SECONDS, TURNS = 64, 0.02, 8
TURN_SECONDS = TOKENS * STEP_SECONDS
_LIMIT_SECONDS = 300.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Case:
    """Slots, episodes open at most, seconds of a tool, and the share that is a goal."""

    slots: int
    open_episodes: int
    tool_seconds: float
    goal: str


CASES = (
    Case(64, 256, TURN_SECONDS, ">= 90 %"),
    Case(64, 64, TURN_SECONDS, "< 65 %"),
    Case(256, 1000, 0.05, ">= 90 %"),
)


@dataclass(frozen=True)
class Figures:
    """What was measured."""

    busy: float
    turns: int
    seconds: float
    cpu_seconds: float


def settings(case: Case, model: Path) -> RunConfig:
    """One batch is more than will ever be complete."""
    tool = Path(__file__).with_name("slow_tool.py")
    return build_config(
        {
            "model": {"path": str(model)},
            "task": {"kind": "seeds"},
            "environment": {
                "name": f"{tool}:SlowTool",
                "arguments": {"turns": TURNS, "seconds": case.tool_seconds},
            },
            "schedule": {
                "preset": "copris",
                "concurrency": case.slots,
                "open_episodes": case.open_episodes,
                "groups_per_batch": 100_000,
                "group_size": 8,
            },
            "sampling": {"max_new_tokens": TOKENS},
            "engines": {
                "kind": "simulated",
                "count": 2,
                "stream_interval": TOKENS,
                "max_total_tokens": 1 << 20,
            },
            "weights": {"transport": "tensor", "verify": "never"},
            "eval": {"prompts": 1},
            "steps": 100,
        }
    )


async def measured(case: Case, seconds: float, folder: Path) -> Figures:
    """Run it until the first episodes have ended, then for `seconds`."""
    write_character_tokenizer(folder)
    config = settings(case, folder)
    model = SimulatedEngineModel(
        mean_length=10**9, step_seconds=STEP_SECONDS, stream_interval=TOKENS
    )
    thread = EngineThread()
    launcher = FaultyLauncher(config.engines, model, thread, control_seconds=_LIMIT_SECONDS)
    with local_place(folder) as place:
        manager = RolloutManager(
            config,
            task=build_task(config.task, config.model.path, config.eval, plays=True),
            scorers=NoScorers(),
            launcher=launcher,
            store_file=folder / "store.sqlite",
            events_directory=folder / "events",
            environments=EnvironmentWorkers(config, place),
        )
        try:
            await manager.start()
            await manager.attach(ResumePoint(0))
            addresses = await manager.begin_update(0, 0)
            for served in launcher.serving():
                thread.do(served.server._faulty.set_weights, PolicyVersion(0, 0))
            await manager.end_update(0, 0, [address.engine_id for address in addresses], False)
            await manager.verify_update(0, 0, None, False)
            return await _window(manager, thread, case, seconds)
        finally:
            await manager.stop()
            thread.close()


async def _window(
    manager: RolloutManager, thread: EngineThread, case: Case, seconds: float
) -> Figures:
    statistics = manager._driver.statistics

    def turns() -> int:
        return statistics.counts.tokens // TOKENS

    async with asyncio.timeout(_LIMIT_SECONDS):
        while turns() < case.open_episodes * (TURNS + 2):
            await asyncio.sleep(_POLL_SECONDS)
    before = await _reading(manager, thread)
    await asyncio.sleep(seconds)
    after = await _reading(manager, thread)
    slot_seconds, passed, tokens, cpu = (b - a for a, b in zip(before, after, strict=True))
    return Figures(slot_seconds / passed / case.slots, int(tokens / TOKENS), passed, cpu)


async def _reading(manager: RolloutManager, thread: EngineThread) -> tuple[float, ...]:
    """Slot seconds, their clock, tokens, and CPU seconds without the engines'."""

    async def engines() -> float:
        return time.thread_time()

    statistics = manager._driver.statistics
    statistics.running_changed(len(manager._driver._generation))  # counts the time up to now
    counts = statistics.counts
    cpu = time.process_time() - await thread.call(engines())
    return (counts.slot_seconds, counts.seconds, counts.tokens, cpu)


def report(found: list[tuple[Case, Figures]]) -> str:
    """A table with the command, the machine and the date."""
    rows: list[list[Any]] = [
        [
            case.slots,
            case.open_episodes,
            f"{case.tool_seconds:g} s",
            f"{100 * figures.busy:.1f} %",
            case.goal,
            f"{figures.turns / figures.seconds:.1f}",
            f"{100 * figures.turns / figures.seconds * TURN_SECONDS / case.slots:.1f} %",
            f"{1000 * figures.cpu_seconds / max(1, figures.turns):.2f} ms",
        ]
        for case, figures in found
    ]
    head = ["N'", "open episodes", "tool", "slots busy", "goal", "turns/s"]
    head += ["full rate", "manager CPU a turn"]
    today = datetime.datetime.now(datetime.UTC).date()
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{command_line('benchmarks.slots')}, {today}, {machine}\n\n{table(head, rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.slots", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), default=None)
    parser.add_argument("--out", type=Path, default=None)
    parsed = parser.parse_args()
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # streams that the end breaks off
    found = []
    for number, case in enumerate(CASES):
        if parsed.case in (None, number):
            with tempfile.TemporaryDirectory(prefix="slots-") as folder:
                run = uvloop.run(measured(case, parsed.seconds, Path(folder)))
            print(case, run, flush=True)
            found.append((case, run))
    text = report(found)
    print(text)
    if parsed.out is not None:
        parsed.out.write_text(f"# Slots and tools\n\n{text}")


if __name__ == "__main__":
    main()

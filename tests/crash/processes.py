"""Injects faults into a whole run: `megatron-async train` in separate processes.

These runs test faults that a run in one process (`world.py`) cannot have: a SIGSTOP of only the
trainer or only the manager, a disk and a clock that fail for all processes, and a second `train` on
the same directory.

Invariants
- If a fault that may end the run ended it, the run is resumed, as a user would do. A run that ends
  for another reason has broken a promise.
- After every fault the run must make another optimizer step.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.crash.checks import audit
from tests.crash.disk import Edges, build_library
from tests.crash.evidence import gather
from tests.crash.faults import KINDS, Fault
from tests.crash.hostile_reward import COMMAND_VARIABLE, IMPORT_PATH
from tests.crash.run import RunFailed, RunUnderFire, configuration, prepare, rules_of
from tests.crash.world import Result

PROCESS_KINDS = (
    "engine hangs",
    "engine hangs for a moment",
    "engine dies",
    "trainer pauses",
    "trainer pauses for long",
    "trainer restarts",
    "manager pauses",
    "scorer hangs",
    "scorer floods its output",
    "scorer forks",
    "scorer eats memory",
    "scorer dies",
    "disk is slow",
    "disk hangs at fsync",
    "disk is full",
    "disk is read-only",
    "clock jumps ahead",
    "clock jumps back",
    "second run",
)
LONGER = 3.0
"""Factor of all durations compared with runs in one process; an engine is hung after 9 s here."""
# Time limit of a weight update. It is shorter than the fault "trainer pauses for long".
_UPDATE_SECONDS = 20.0
_HEAL_SECONDS = 3.0
_MAX_JUMP_SECONDS = 3600.0
_SECOND_RUN_SECONDS = 120.0
_USER_ERROR = 2


class Program:
    """Carries out faults on one run."""

    def __init__(
        self, preset: str, engine: str, root: Path, name: str, seed: str, cluster: str
    ) -> None:
        prepare(root)
        changes: dict[str, Any] = {
            "cluster": cluster,
            "engines": {"hang_timeout_seconds": 3.0 * LONGER},
            "weights": {"timeout_seconds": _UPDATE_SECONDS},
            "task": {"scorer_timeout_seconds": 4.0},
            "reward": [{"name": IMPORT_PATH}],
        }
        config = configuration(preset, engine, root, name, changes)
        self._edges = Edges(root / f"{name}.page")
        self._command = root / f"{name}.scorer_fault"
        environment = self._edges.environment(build_library(root), root / name)
        environment[COMMAND_VARIABLE] = str(self._command)
        self.run = RunUnderFire(config, random.Random(seed), environment=environment)
        self.broken: list[str] = []
        self.resumes = 0
        self._may_end = False

    def suffer(self, faults: Sequence[Fault]) -> None:
        """Start the run, inject `faults`, and let the run end; add problems to `broken`."""
        run = self.run
        try:
            run.start()
            for fault in faults:
                time.sleep(LONGER * fault.after)
                self._do(fault)
                self._continue(fault)
            run.last_life(steps=2)
            run.wait_for_end()
        except RunFailed as failure:
            self.broken.append(f"a run did not continue: {failure}")
        finally:
            self._edges.heal()
            run.close()

    def _continue(self, fault: Fault) -> None:
        """End `fault` and wait for another step; resume the run first if the fault ended it.

        Raises:
            RunFailed: The run makes no further step.
        """
        run, deadline = self.run, time.monotonic() + _HEAL_SECONDS
        while KINDS[fault.kind].ends and run.ended() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        self._edges.heal()
        wanted = run.step() + 1
        try:
            run.wait_for_step(wanted)
        except RunFailed:
            if run.ended() is None or not self._may_end:
                raise
            self.resumes += 1
            run.resume()
            run.wait_for_step(run.step() + 1)

    def _do(self, fault: Fault) -> None:
        run, seconds = self.run, LONGER * fault.seconds
        self._may_end = self._may_end or KINDS[fault.kind].ends
        match fault.kind:
            case "engine hangs":
                run.hang("engine")
            case "engine hangs for a moment":
                run.pause("engine", seconds, fault.kind)
            case "engine dies":
                run.kill("engine", patient=False)
            case "trainer pauses" | "trainer pauses for long":
                run.pause("trainer", seconds, fault.kind)
            case "trainer restarts":
                run.note(fault.kind)
                run.kill("trainer", patient=False)
            case "manager pauses":
                run.pause("manager", seconds, fault.kind)
            case "clock jumps ahead" | "clock jumps back":
                run.note(fault.kind)
                ahead = min(fault.seconds, _MAX_JUMP_SECONDS)
                self._edges.jump(ahead if fault.kind == "clock jumps ahead" else -ahead)
            case "second run":
                run.note(fault.kind)
                self._second_run()
            case kind if KINDS[kind].edge == "disk":
                run.note(kind)
                self._edges.disk(kind)
                time.sleep(fault.seconds)
            case kind:
                run.note(kind)
                prepared = self._command.with_suffix(".next")
                prepared.write_text(kind)
                prepared.rename(self._command)

    def _second_run(self) -> None:
        command = [sys.executable, "-m", "megatron_async.cli", "train", "--resume"]
        second = subprocess.run(
            [*command, str(self.run.directory.path)],
            capture_output=True,
            text=True,
            timeout=_SECOND_RUN_SECONDS,
            check=False,
        )
        if second.returncode != _USER_ERROR or "is in use by" not in second.stderr:
            self.broken.append(f"a second run was not refused: {second.stderr[-500:]}")


def suffer_in_processes(
    preset: str,
    engine: str,
    root: Path,
    name: str,
    seed: str,
    faults: Sequence[Fault],
    cluster: str,
) -> Result:
    """Start a run in separate processes, inject faults and check its evidence.

    Args:
        preset: Preset of the run's schedule.
        engine: Kind of the engines.
        root: Directory that contains the run's directory.
        name: Name of the run.
        seed: Seed of the choice among processes.
        faults: Faults in order.
        cluster: Process backend of the run.

    Returns:
        The counts of the run and its broken promises.
    """
    program, began = Program(preset, engine, root, name, seed, cluster), time.monotonic()
    program.suffer(faults)
    result = Result(preset, seed, broken=program.broken, resumes=program.resumes)
    run = program.run
    if not program.broken:
        evidence = gather(run.directory, run.looks)
        for check, found in audit(evidence, rules_of(run.config)).items():
            result.broken += [f"{check}: {sentence}" for sentence in found]
        result.injected = tuple(evidence.injected)
        result.trajectories, result.batches = evidence.trajectories, len(evidence.batches)
        result.largest_lag = max((batch.lag for batch in evidence.batches), default=0)
    result.seconds = time.monotonic() - began
    return result

"""Starts, kills and resumes one run: `megatron-async train` in separate processes.

Invariants
- The only signals are SIGKILL, SIGSTOP and SIGCONT, and only processes of the run receive them.
- After a kill of one process, the run must make another optimizer step by itself within the time
  limit. After a kill of the whole process tree, the run is resumed, as a user would do.
- Every wait has a limit. A run that ends by itself raises RunFailed with the end of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from megatron_async.config import RunConfig
from megatron_async.engines.simulated.server import engine_model
from megatron_async.environments.conversation import Conversation
from megatron_async.files.disk import json_lines
from megatron_async.models.tiny_model import EOS_ID, TinyModel, build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.tasks.text_task import load_tokenizer, stop_tokens
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.trajectory.types import CHUNK_TOKENS
from tests.crash.checks import Rules
from tests.crash.evidence import Evidence, Seen, gather, look, open_names
from tests.crash.injection import injected
from tests.crash.ledger import LEDGER, RUN_VARIABLE, Account, ledger_file

Target = Literal["trainer", "manager", "engine", "scorer", "worker", "tree"]
PARTS: tuple[Target, ...] = ("trainer", "manager", "engine", "scorer")
PARTS_OF_EPISODES: tuple[Target, ...] = ("worker", "manager", "engine", "trainer")
TARGETS: tuple[Target, ...] = (*PARTS, "worker", "tree")
_MARKS: dict[Target, tuple[str, ...]] = {
    "trainer": ("megatron_async.train_loop.rank",),
    "manager": ("process_backends.host rollout-manager", "ray::ManagerHost"),
    "engine": ("megatron_async.engines.sglang.server", "megatron_async.engines.simulated.server"),
    "scorer": ("megatron_async.scoring.process_main", "ray::ScorerWorker"),
    "worker": ("process_backends.host environments",),
}
SHAPE = TinyModel(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_size=64)
_LAUNCHER = "torch.distributed.run"
_POLL_SECONDS = 0.1
_LONGEST_POLL_SECONDS = 5.0
_END_SECONDS = 30.0


class RunFailed(Exception):
    """The run did not continue or ended by itself; the message contains the end of its log."""


@dataclass(frozen=True)
class Kill:
    """A kill of a process or of the whole process tree.

    Attributes:
        target: Kind of the killed process.
        step: Number of optimizer steps before the kill.
        arrivals: Size of the file of arrivals after the kill.
        recovered_seconds: Seconds from the kill to the next optimizer step; None if the test did
            not wait for it.
    """

    target: Target
    step: int
    arrivals: int
    recovered_seconds: float | None


def prepare(root: Path) -> None:
    """Write the files that all runs share into `root`: a tiny model and the problems.

    The model is so small that the start of a run consists of little but imports.
    """
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "model").exists():
        build_tiny_model(root / "model", seed=1, shape=SHAPE)
    lines = [
        json.dumps({"prompt": f"{i}+{j}=", "answer": i + j}) for i in range(40) for j in (3, 7)
    ]
    (root / "problems.jsonl").write_text("\n".join(lines))


def lag_bound(preset: str) -> dict[str, int]:
    """Return the setting of a lag bound for presets that have no strict bound.

    The presets `sync` and `rapid` keep their bound of 0.
    """
    bounds = {"copris": 4, "pipeline": 4, "async": 2}
    return {"max_async_level": bounds[preset]} if preset in bounds else {}


def configuration(
    preset: str, engine: str, root: Path, name: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings of a crash-test run.

    Steps and engine chunks are small, so that a kill at any moment hits unfinished work.

    Args:
        preset: Preset of the schedule.
        engine: Kind of the engines.
        root: Directory that contains the run's directory.
        name: Name of the run.
        changes: Settings that replace the defaults, by section.
    """
    simulated = engine == "simulated"
    config: dict[str, Any] = {
        "name": name,
        "root": str(root),
        "steps": 1_000_000,
        "model": {"path": str(root / "model")},
        "trainer": {"max_restarts": 1_000_000, "wait_for_batch_seconds": 120},
        "optimizer": {"lr": 1.0e-5},
        "task": {"kind": "files", "name": "exact", "path": str(root / "problems.jsonl")},
        "schedule": {
            "preset": preset,
            "groups_per_batch": 4,
            "group_size": 2,
            "concurrency": 16,
            "updates_per_batch": 1,
            **lag_bound(preset),
        },
        "sampling": {"max_new_tokens": 160},
        "eval": {"prompts": 1},
        "checkpoint": {"every_steps": 2, "export_hf": False},
        "engines": {
            "kind": engine,
            "count": 2,
            "device": "cpu",
            "max_total_tokens": 16384,
            "stream_interval": 8,
            "hang_timeout_seconds": 20,
            "start_timeout_seconds": 300,
            "max_restarts": 1_000_000,
        },
        "weights": {"timeout_seconds": 60},
        "store": {"compact_after_checkpoints": 2},
        "telemetry": {"progress": "lines", "trackers": []},
    }
    if simulated:
        config["engines"]["simulated"] = {"mean_length": 60, "step_seconds": 0.008}
        config["weights"] |= {"transport": "tensor", "verify": "never"}
    for section, values in changes.items():
        own = isinstance(values, dict)
        config[section] = {**config.get(section, {}), **values} if own else values
    if simulated and config.keys() & {"environment", "agent"}:
        # An episode has several responses, so each response is shorter.
        config["engines"]["simulated"]["mean_length"] = 16
    return config


def of_episodes(root: Path, name: str) -> dict[str, Any]:
    """Return settings for episodes of `noted_environment.py`, which records its calls.

    Args:
        root: Directory that contains the run's directory.
        name: Name of the run.
    """
    environment = Path(__file__).with_name("noted_environment.py").resolve()
    return {
        "task": {"kind": "seeds", "name": "", "path": ""},
        "environment": {
            "name": f"{environment}:Noted",
            "arguments": {"ledger": str(ledger_file(root / name, "calls"))},
        },
        "episode": {"step_seconds": 20.0},
        "sampling": {"max_new_tokens": 40},
    }


def of_agents(root: Path, name: str) -> dict[str, Any]:
    """Return settings for episodes of `noted_agent.py`, which records the responses it receives.

    Args:
        root: Directory that contains the run's directory.
        name: Name of the run.
    """
    changes = of_episodes(root, name)
    played = changes.pop("environment")
    played["name"] = f"{Path(__file__).with_name('noted_agent.py').resolve()}:play"
    return {**changes, "agent": played}


def rules_of(config: dict[str, object]) -> Rules:
    """Return the settings of a run that the checks need."""
    settings = RunConfig.model_validate(config)
    simulated = None
    if settings.engines.kind == "simulated":
        simulated = engine_model(settings.engines, Path(settings.model.path))
    return Rules(
        CHUNK_TOKENS,
        settings.schedule.max_async_level,
        EOS_ID,
        settings.sampling.max_new_tokens,
        simulated,
    )


@dataclass
class RunUnderFire:
    """Starts, kills, waits for and resumes one run.

    Attributes:
        config: Settings of the run.
        rng: Chooses among the processes of a kind.
        limit_seconds: Limit of every wait in seconds.
        kills: Kills so far.
        looks: Contents of the store at moments during the run.
        open_at: Names of the episodes that were open, for each kill.
        environment: Additional environment variables of the processes.
    """

    config: dict[str, Any]
    rng: random.Random
    limit_seconds: float = 300.0
    kills: list[Kill] = field(default_factory=list)
    looks: list[dict[int, Seen]] = field(default_factory=list)
    open_at: list[frozenset[str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.config["root"]) / self.config["name"])

    @property
    def log(self) -> Path:
        return Path(self.config["root"]) / f"{self.config['name']}.log"

    # ------------------------------------------------------------ start and end

    def start(self) -> None:
        """Start a new run and wait for its first step.

        Raises:
            RunFailed: The run makes no step.
        """
        settings = Path(self.config["root"]) / f"{self.config['name']}.yaml"
        settings.write_text(yaml.safe_dump(self.config))
        self._launch("--config", str(settings))
        self.wait_for_step(1)

    def resume(self, *overrides: str) -> None:
        """Resume the run from its directory, with `overrides` of settings."""
        self._launch("--resume", str(self.directory.path), *overrides)

    def last_life(self, steps: int, *overrides: str) -> None:
        """Kill the whole process tree and resume the run for its last `steps` steps.

        Raises:
            RunFailed: The run does not continue.
        """
        self.kill("tree", *overrides, more_steps=steps)

    def evidence(self) -> Evidence:
        """Collect the evidence of the run, which must have ended."""
        decode = answer_decoder(self.config["model"]["path"]) if self.has_episodes else None
        remade = sum(kill.target in ("worker", "manager", "tree", "trainer") for kill in self.kills)
        return gather(
            self.directory, self.looks, decode=decode, open_at=self.open_at, lives=1 + remade
        )

    @property
    def has_episodes(self) -> bool:
        """Whether the trajectories of the run are episodes."""
        return bool(self.config.keys() & {"environment", "agent"})

    def wait_for_end(self) -> None:
        """Wait until the run has completed.

        Raises:
            RunFailed: The run fails or does not end within the limit.
        """
        process = self._process
        assert process is not None
        self._wait(lambda: process.poll() is not None, "end")
        if process.returncode != 0:
            raise RunFailed(f"it ended with exit code {process.returncode}: {self._tail()}")

    def close(self) -> None:
        """Kill all processes of the run that are still alive."""
        if self._process is not None and self._process.poll() is None:
            self._kill_tree()

    def _changes(self) -> dict[str, str]:
        """Return the environment variables that let the processes write the ledger."""
        variables = injected(Path(self.config["root"]) / "site", LEDGER)
        return {**variables, RUN_VARIABLE: str(self.directory.path)}

    def _launch(self, *arguments: str) -> None:
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_async.cli", "train", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    **self.environment,
                    **self._changes(),
                },
                start_new_session=True,
            )

    # ------------------------------------------------------------ progress

    def wait_for_verification(self) -> None:
        """Wait until the run starts a verification for which its trainer does not wait.

        Raises:
            RunFailed: None starts within the limit.
        """
        file = ledger_file(self.directory.path, "verifications")

        def lines() -> list[bytes]:
            return file.read_bytes().splitlines() if file.exists() else []

        seen = len(lines())
        self._wait(
            lambda: len(lines()) > seen and b"unverified" in lines()[-1], "start of a verification"
        )

    def step(self) -> int:
        """Return the number of optimizer steps of the surviving lineage so far."""
        lines = read_metrics(self.directory.metrics_file)
        return int(lines[-1]["step"]) + 1 if lines else 0

    def written(self) -> int:
        """Return the number of steps that all lineages have written to the metrics file."""
        file = self.directory.metrics_file
        lines = json_lines(file.read_bytes()) if file.exists() else ()
        return sum(line.get("kind") == "train" for line in lines)

    def wait_for_step(self, step: int) -> None:
        """Wait until the surviving lineage has made `step` steps."""
        self._wait(lambda: self.step() >= step, f"step {step}")

    def wait_for_progress(self) -> None:
        """Wait until another step has been made.

        Steps are counted. Their times are not used, because the run's clock may jump back.
        """
        before = self.written()
        self._wait(lambda: self.written() > before, "a further step")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        assert self._process is not None
        waited, looked = 0.0, time.monotonic()
        while not condition():
            # If this process was stopped from outside, most of that time must not count.
            waited += min(time.monotonic() - looked, _LONGEST_POLL_SECONDS)
            looked = time.monotonic()
            if self._process.poll() is not None:
                if condition():
                    return
                raise RunFailed(
                    f"it ended with exit code {self._process.returncode}: {self._tail()}"
                )
            if waited > self.limit_seconds:
                raise RunFailed(f"no {what} within {self.limit_seconds:g} s: {self._tail()}")
            time.sleep(_POLL_SECONDS)

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""

    # ------------------------------------------------------------ kills

    def kill(
        self, target: Target, *overrides: str, patient: bool = True, more_steps: int | None = None
    ) -> None:
        """Kill a process of the kind `target`, or the whole process tree, which is then resumed.

        Args:
            target: Kind of the process.
            overrides: Settings with which the run is resumed after a kill of the tree.
            patient: Whether to wait for another step.
            more_steps: Number of steps after which the resumed run ends; None for no change.

        Raises:
            RunFailed: The run does not continue.
        """
        self.looks.append(look(self.directory))
        # An agent's program starts again and receives its responses again, so an open episode of an
        # agent cannot be counted. The check "more than a chunk lost" covers agents.
        if "environment" in self.config and target in ("worker", "manager", "tree"):
            self.open_at.append(open_names(self.directory))
        step = self.step()
        began = time.time()
        if target == "tree":
            self._kill_tree()
            self.looks.append(look(self.directory))
            # The steps are counted after the kill, because the run continued until then.
            if more_steps is not None:
                overrides = (*overrides, f"steps={self.step() + more_steps}")
            self.resume(*overrides)
        else:
            self._kill_one(target)
        arrivals = ledger_file(self.directory.path, "arrivals")
        size = arrivals.stat().st_size if arrivals.exists() else 0
        if patient:
            self.wait_for_progress()
        self.kills.append(Kill(target, step, size, time.time() - began if patient else None))

    def hang(self, target: Target) -> psutil.Process:
        """Send SIGSTOP to a process of the kind `target` and to its children; return the process.

        Raises:
            RunFailed: No such process appears within the limit.
        """
        self.looks.append(look(self.directory))
        self._wait(lambda: bool(self._that_can_hang(target)), f"{target} process to stop")
        chosen = self.rng.choice(self._that_can_hang(target))
        if target == "engine":
            self.note("engine hangs", chosen)
        for process in (chosen, *chosen.children(recursive=True)):
            process.send_signal(signal.SIGSTOP)
        return chosen

    def pause(self, target: Target, seconds: float, kind: str) -> None:
        """Stop a process of the kind `target` for `seconds`; note the fault as `kind`.

        Raises:
            RunFailed: No such process appears within the limit.
        """
        self._wait(lambda: bool(self.processes(target)), f"{target} process to pause")
        chosen = self.rng.choice(self.processes(target))
        self.note(kind, chosen if target == "engine" else None)
        with contextlib.suppress(psutil.NoSuchProcess):
            chosen.send_signal(signal.SIGSTOP)
            try:
                time.sleep(seconds)
            finally:
                chosen.send_signal(signal.SIGCONT)

    def ended(self) -> str | None:
        """Return the end of the log if the run has ended by itself, or None while it continues."""
        assert self._process is not None
        return None if self._process.poll() is None else self._tail()

    def wait_until_killed(self, *hung: psutil.Process) -> None:
        """Wait until the run itself has killed the stopped processes.

        Raises:
            RunFailed: The run does not kill them within the limit.
        """
        self._wait(lambda: not any(map(_lives, hung)), "end of what was hung")

    def _that_can_hang(self, target: Target) -> list[psutil.Process]:
        """Return the processes of the kind `target` that the run must kill if they hang.

        Ray's worker of a scorer is excluded, because it enforces the time limit of the process that
        runs the scorer's code.
        """
        return [p for p in self.processes(target) if not p.cmdline()[0].startswith("ray::")]

    def processes(self, target: Target) -> list[psutil.Process]:
        """Return the processes of this run that are of the kind `target`."""
        found = []
        for process in self._family():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            marked = any(mark in line for mark in _MARKS[target]) and _LAUNCHER not in line
            if marked and (target != "worker" or self._of_manager(process)):
                found.append(process)
        return found

    @staticmethod
    def _of_manager(process: psutil.Process) -> bool:
        """Return whether a manager started the process.

        Other environment workers belong to the trial episode before the run.
        """
        with contextlib.suppress(psutil.Error):
            lines = [" ".join(parent.cmdline()) for parent in process.parents()]
            return any(mark in line for line in lines for mark in _MARKS["manager"])
        return False

    def _kill_one(self, target: Target) -> None:
        """Kill a process of the kind `target`; wait for one if all are being restarted."""

        def done() -> bool:
            found = self.processes(target)
            if not found:
                return False
            chosen = self.rng.choice(found)
            try:
                if target == "engine":
                    self.note("engine dies", chosen)
                chosen.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                return False
            return True

        self._wait(done, f"{target} process to kill")

    def note(self, kind: str, engine: psutil.Process | None = None) -> None:
        """Write a fault to the ledger; it explains why `engine` is replaced (`checks.py`).

        Args:
            kind: Name of the fault's kind.
            engine: Process of the engine that failed; None if no engine failed.
        """
        url = ""
        if engine is not None:
            [port] = [word for word in engine.cmdline() if word.startswith("--port=")]
            url = f"http://127.0.0.1:{port.removeprefix('--port=')}"
        Account(ledger_file(self.directory.path, "faults")).add(kind=kind, engine=url)

    def _kill_tree(self) -> None:
        assert self._process is not None
        everyone = [psutil.Process(self._process.pid), *self._family()]
        for process in everyone:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self._process.wait(_END_SECONDS)
        psutil.wait_procs(everyone, timeout=_END_SECONDS)

    def _family(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def answer_decoder(model: str) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes a response's tokens to the text that environments receive."""
    tokenizer = load_tokenizer(model)
    stops = stop_tokens(model, tokenizer)
    return Conversation(RunConfig().task, tokenizer, stops).answer_text


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

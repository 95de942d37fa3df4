"""Makes one measured run: starts it, kills it, and resumes it until a batch is trained."""

from __future__ import annotations

import argparse
import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.reporting import Row
from benchmarks.restart.counters import COUNTING, VARIABLE, Counters, read_counters
from megatron_async.files.disk import json_lines
from tests.crash.injection import injected
from tests.crash.run import RunUnderFire, configuration

_LIMIT_SECONDS = 1200.0
_POLL_SECONDS = 0.05
_LENGTHS = (3600, 0.35)  # median, and standard deviation of the logarithm


def lengths(count: int, longest: int, seed: int) -> list[int]:
    """Return `count` response lengths with a long tail, which are equal for equal seeds."""
    median, deviation = _LENGTHS
    drawn = np.random.default_rng(seed).lognormal(np.log(median), deviation, count)
    return [int(value) for value in np.clip(drawn * longest / 5000, longest // 5, longest)]


def settings(root: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of one run."""
    answers = options.groups * options.group_size
    changes: dict[str, Any] = {
        "steps": 1,
        "seed": options.seed,
        "schedule": {
            "groups_per_batch": options.groups,
            "group_size": options.group_size,
            "concurrency": answers,
        },
        "sampling": {"max_new_tokens": options.longest},
        "trainer": {"max_restarts": 0, "wait_for_batch_seconds": _LIMIT_SECONDS},
        "eval": {"prompts": 1, "max_new_tokens": 8},
        "checkpoint": {"every_steps": 1000, "export_hf": False},
        "engines": {
            "max_total_tokens": answers * (options.longest + 64),
            "max_running_requests": answers,
            "context_length": options.longest + 128,
            "stream_interval": options.stream_interval,
            "max_restarts": 0,
            "simulated": {"step_seconds": options.step_seconds},
        },
        "experiment": {
            "forced_lengths": lengths(answers, options.longest, options.seed),
        },
    }
    return configuration("sync", "simulated", root, name, changes)


class RestartedRun(RunUnderFire):
    """A run that is started, killed and resumed. Each start or resume has separate counters."""

    def __init__(self, root: Path, name: str, options: argparse.Namespace) -> None:
        super().__init__(settings(root, name, options), random.Random(0), _LIMIT_SECONDS)
        self._lives = 0
        self.began = 0.0

    @property
    def counters(self) -> Path:
        """Directory of the counters since the newest start or resume."""
        return Path(f"{self.directory.path}-{self._lives}")

    def live(self) -> None:
        """Start the run or, if it was started before, resume it."""
        self._lives += 1
        self.began = time.time()
        if self._lives == 1:
            file = self.directory.path.with_suffix(".yaml")
            file.write_text(yaml.safe_dump(self.config))
            self._launch("--config", str(file))
        else:
            self.resume()

    def _changes(self) -> dict[str, str]:
        variables = injected(Path(self.config["root"]) / "site", COUNTING)
        return {**variables, VARIABLE: str(self.counters)}

    def kill_all(self) -> None:
        """Send SIGKILL to every process of the run; return when all are dead."""
        self._kill_tree()

    def counted(self, kind: str) -> list[Counters]:
        """Return the counters of this kind since the newest start or resume."""
        return read_counters(self.counters, kind)

    def wait_for_tokens(self, tokens: float) -> None:
        """Wait until engines have generated `tokens` tokens since the newest start or resume."""
        while sum(one["tokens"] for one in self.counted("engine")) < tokens:
            if self.ended() is not None:
                raise RuntimeError(f"the run ended before the kill: {self.ended()}")
            if time.time() > self.began + _LIMIT_SECONDS:
                raise RuntimeError(
                    f"the engines did not generate {tokens:.0f} tokens within {_LIMIT_SECONDS:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def store_bytes(self) -> int:
        """Return the size of the store's files in bytes."""
        file = self.directory.store_file
        return sum(one.stat().st_size for one in file.parent.glob(f"{file.name}*"))

    def until_trained(self) -> Row:
        """Wait for the first trained batch; return seconds since the newest start or resume."""
        self.wait_for_progress()
        lines = json_lines(self.directory.metrics_file.read_bytes())
        [manager], [trainer] = self.counted("manager"), self.counted("trainer")
        moments = {
            "first_request": manager["first"],
            "first_token": min(one["first"] for one in self.counted("engine") if one["first"]),
            "last_request": manager["last"],
            "batch": trainer["first"],
            "trained": max(line["time"] for line in lines if line["kind"] == "train"),
        }
        row = {name: round(moment - self.began, 2) for name, moment in moments.items()}
        return {**row, "tokens": trainer["tokens"]}


def losses(
    generated: np.ndarray[Any, Any], started: np.ndarray[Any, Any], resumed: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return the number of tokens that each unfinished response lost.

    Args:
        generated: Length of each response at the kill, as generated by engines. All lengths are in
            tokens and include the prompt.
        started: Length at the response's first request; 0 if there was no request.
        resumed: Length at the first request after the resume; 0 for a finished response, which
            needs no request.

    Raises:
        ValueError: The store has tokens that no engine generated.
    """
    unfinished = (started > 0) & (resumed > 0)
    lost = np.maximum(generated, started)[unfinished] - resumed[unfinished]
    if (lost < 0).any():
        raise ValueError(f"{int((lost < 0).sum())} responses have tokens that were not generated")
    return np.asarray(lost)


def pauses(run: RestartedRun) -> Row:
    """Return the pauses of engines, and the waits of streams for the store."""
    engines, relays = run.counted("engine"), run.counted("relay")
    [manager] = run.counted("manager")
    steps = sum(one["events"] for one in engines)
    return {
        "engine_pauses": sum(one["pauses"] for one in engines),
        "step_ms": 1e3 * sum(one["seconds"] for one in engines) / steps,
        "longest_step_ms": 1e3 * max(one["longest"] for one in engines),
        "commit_ms": 1e3 * manager["seconds"] / manager["events"],
        "longest_commit_ms": 1e3 * manager["longest"],
        "blocked": sum(one["events"] for one in relays),
        "longest_blocked_ms": 1e3 * max((one["longest"] for one in relays), default=0.0),
    }


def killed_run(run: RestartedRun, tokens: float) -> Row:
    """Kill a run when its engines have generated `tokens` tokens, and resume it; return its row."""
    with closing(run):
        run.live()
        run.wait_for_tokens(tokens)
        size = run.store_bytes()
        run.kill_all()
        killed_after, waits = time.time() - run.began, pauses(run)
        total = sum(one["tokens"] for one in run.counted("engine"))
        generated = np.sum([one.trajectories for one in run.counted("engine")], axis=0)
        started = run.counted("manager")[0].trajectories
        run.live()
        resumed_run = run.until_trained()
        resumed = run.counted("manager")[0].trajectories
    unfinished = (started > 0) & (resumed > 0)
    lost = losses(generated, started, resumed)
    return {
        "generated": total,
        "unfinished": int(unfinished.sum()),
        "killed_after": killed_after,
        "lost_mean": float(lost.mean()),
        "lost_largest": int(lost.max()),
        "file_bytes": size / total,
        **waits,
        **resumed_run,
    }


def scratch_run(run: RestartedRun) -> Row:
    """Make a run that generates the same responses without a kill; return its row."""
    with closing(run):
        run.live()
        return {**run.until_trained(), **pauses(run)}

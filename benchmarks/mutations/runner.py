"""Runs mutations in a copy of the repository.

Invariants
- The checkout is never modified; the copy is removed at the end.
- The unmutated copy must pass first: where it does not, every mutation of those tests is broken.
- Tests are derandomised (hypothesis draws the same examples every time), so the result repeats.
- One run of tests at a time, each with a time limit, after which all its processes are ended.
- No bytecode is written: two changes in one second would look alike to its check.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

from benchmarks.mutations.mutation import ROOT, Check, Mutation

Result = Literal["killed", "survived", "hung", "broken"]
_COPIED: Final = (
    *("megatron_async", "kernels", "tests", "benchmarks", "configs", "launch", "docs", "examples"),
    "pyproject.toml",
)
_PYTEST: Final = ("-x", "-q", "-p", "no:cacheprovider", "--durations=0")
_NAMED: Final = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", re.MULTILINE)
_RAISED: Final = re.compile(r"^E +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """Result of one run of tests; `noticed` is the test that failed, `why` its error's first line.

    A run without a failure is `survived`, whether the copy is mutated or not.
    """

    result: Result
    output: str

    @property
    def noticed(self) -> str:
        return self._first(_NAMED)

    @property
    def why(self) -> str:
        return self._first(_RAISED)

    def _first(self, pattern: re.Pattern[str]) -> str:
        found = pattern.search(self.output) if self.result == "killed" else None
        return found[1] if found else ""


def run(mutations: Sequence[Mutation]) -> Iterator[tuple[Mutation, Outcome]]:
    """Each mutation's outcome, one after the other."""
    sys.dont_write_bytecode = True
    if not all(mutation.check.apart for mutation in mutations):
        import torch  # imported once, before children are forked

        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name).resolve()
        _copy(folder)
        _require_copy(folder)
        unmutated: dict[Check, Outcome] = {}
        for mutation in mutations:
            check = mutation.check
            if check not in unmutated:
                unmutated[check] = outcome_of(folder, check)
            yield mutation, _outcome(mutation, folder, unmutated[check])


def counted(outcomes: Sequence[Outcome]) -> str:
    """Counts of all results on one line."""
    found = Counter(outcome.result for outcome in outcomes)
    results: tuple[Result, ...] = ("killed", "survived", "hung", "broken")
    return ", ".join(f"{found[result]} {result}" for result in results)


def outcome_of(folder: Path, check: Check) -> Outcome:
    """Run the tests of a check in the copy as it is now."""
    return _apart(folder, check) if check.apart else _forked(folder, check)


def _outcome(mutation: Mutation, folder: Path, unmutated: Outcome) -> Outcome:
    if unmutated.result != "survived":
        return Outcome("broken", f"the unmutated tests do not pass:\n{unmutated.output}")
    path = folder / mutation.file
    original = path.read_text()
    count = original.count(mutation.before)
    if count != 1:
        return Outcome("broken", f"the text to change occurs {count} times in {mutation.file}")
    try:
        path.write_text(original.replace(mutation.before, mutation.after))
        return outcome_of(folder, mutation.check)
    finally:
        path.write_text(original)


def _copy(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "kernels")]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _require_copy(folder: Path) -> None:
    """Raises RuntimeError where a new process would import another checkout."""
    script = (
        "import megatron_async, megatron_async_kernels, benchmarks\n"
        "for package in (megatron_async, megatron_async_kernels, benchmarks):\n"
        "    print(package.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=_environment(folder),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    for place in done.stdout.split():
        if not place.startswith(str(folder)):
            raise RuntimeError(f"the tests would run against {place}")


def _result_of(code: int) -> Result:
    """Read pytest's exit code; a mutant that cannot be imported shows nothing of the tests."""
    results: dict[int, Result] = {0: "survived", 1: "killed"}
    return results.get(code, "broken")


# ------------------------------------------------------------ in a process of its own


def _apart(folder: Path, check: Check) -> Outcome:
    log = folder / "output.txt"
    keyword = ["-k", check.keyword] if check.keyword else []
    tests = [f"tests/{name}" for name in check.tests]
    derandomised = "--hypothesis-profile=ci"  # hypothesis' own, of that name
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *_PYTEST, derandomised, *keyword, *tests],
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        result = _result_of(process.wait(check.limit_seconds))
    except subprocess.TimeoutExpired:
        result = "hung"
    finally:
        _end(process)
    return Outcome(result, log.read_text(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all that it has started."""
    if process.poll() is not None:
        return
    leader = psutil.Process(process.pid)
    for member in [*leader.children(recursive=True), leader]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue  # ended in between
    process.wait(30)


# ------------------------------------------------------------ in a forked child


def _forked(folder: Path, check: Check) -> Outcome:
    log = folder / "output.txt"
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            with log.open("w") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
                status = _run_tests(folder, check)
        except BaseException as error:  # noqa: BLE001 - the child reports every failure as broken
            log.write_text(f"{log.read_text()}\n{error!r}")
        finally:
            os._exit(status)
    deadline = time.monotonic() + check.limit_seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return Outcome(_result_of(os.waitstatus_to_exitcode(status)), log.read_text())
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return Outcome("hung", log.read_text())


def _run_tests(folder: Path, check: Check) -> int:
    """In a child process: pytest's exit code in `folder`. Never returns in the parent's state.

    The parent has imported torch and hypothesis already, but nothing of the package.
    """
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "kernels")]
    os.environ.update(_environment(folder))
    import hypothesis
    import pytest

    hypothesis.settings.register_profile(
        "mutations",
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("mutations")
    keyword = ["-k", check.keyword] if check.keyword else []
    tests = [f"tests/{name}" for name in check.tests]
    code = int(pytest.main([*_PYTEST, "-m", "not slow", *keyword, *tests]))
    import megatron_async_kernels

    import megatron_async

    for package in (megatron_async, megatron_async_kernels):
        if not str(package.__file__).startswith(str(folder)):
            raise RuntimeError(f"the tests ran against {package.__file__}")
    return code

"""Command line of the GPU checks; the package's docstring describes it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu_check import __doc__ as description
from benchmarks.gpu_check import wheels
from benchmarks.gpu_check.check import (
    RESULTS,
    Check,
    ResultFile,
    reason_to_skip,
    result_of,
    run_apart,
    run_here,
)
from benchmarks.gpu_check.checks import CHECKS


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code: 1 if a check failed, 2 if wheels failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = sorted({check.part for check in CHECKS})
    parser.add_argument("--part", type=int, choices=parts)
    parser.add_argument("--only", metavar="NAME", choices=[check.name for check in CHECKS])
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--again", action="store_true", help="also run checks with an ok line")
    parser.add_argument("--trial-run", action="store_true", help="run on a CPU, at toy sizes")
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="collect packages in DIR and exit"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        chosen = next(check for check in CHECKS if check.name == options.child)
        options.answer.write_text(run_here(chosen, trial_run=options.trial_run).line())
        return 0
    if options.wheels is not None:
        return wheels.main(options.wheels)
    checks = [
        check
        for check in CHECKS
        if options.part in (None, check.part) and options.only in (None, check.name)
    ]
    if options.list:
        for check in checks:
            needs = ", ".join(check.needs) or "nothing beyond torch"
            print(f"part {check.part}  {check.name}: {check.limit_seconds} s; needs {needs}")
        return 0
    return _run(checks, options.out, again=options.again, trial_run=options.trial_run)


def _run(checks: list[Check], folder: Path, *, again: bool, trial_run: bool) -> int:
    """Run the checks in order and record their results; return the exit code."""
    file = ResultFile(folder)
    done = set() if again or trial_run else file.done()
    failed = 0
    for check in checks:
        if check.name in done:
            print(
                f"{check.name}: not repeated, it has an ok line in {file.path.name}",
                file=sys.stderr,
            )
            continue
        skipped = reason_to_skip(check, trial_run=trial_run)
        result = (
            run_apart(check, trial_run=trial_run)
            if skipped is None
            else result_of(check, "skipped", skipped)
        )
        print(result.line(), flush=True)
        if result.status == "failed":
            failed += 1
        if not trial_run and result.device != "cpu":
            file.add(result)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

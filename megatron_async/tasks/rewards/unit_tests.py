"""Runs in the sandbox, beside `program.py` and `tests.py`: the program, then its unit tests.

The proof that the tests ran to their end is a random text on standard input: it is read before the
program starts and written after the last test, so that neither an early exit nor anything printed
passes for success. (A program that searches this interpreter's memory for it could cheat; program
and tests share one interpreter, as they do in HumanEval.)
"""

import builtins
import os
import sys


def _run(path: str, names: dict[str, object]) -> dict[str, object]:
    with open(path) as file:  # noqa: PTH123 - the program has not run yet; no need for pathlib
        exec(compile(file.read(), path, "exec"), names)
    return names


def main() -> None:
    proof, entry = sys.stdin.readline().strip(), sys.stdin.readline().strip()
    report = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    write, end = os.write, os._exit
    names = _run("program.py", {"__name__": "program"})
    # What the program calls `abs` or `all` must not be what the tests call so.
    kept = {n: value for n, value in names.items() if n == entry or not hasattr(builtins, n)}
    _run("tests.py", {**kept, "__name__": "tests"})
    write(report, proof.encode())
    end(0)


if __name__ == "__main__":
    main()

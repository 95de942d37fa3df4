"""Runs in the sandbox, beside `program.py` and `tests.py`: the program, then its unit tests.

The proof that the tests ran to their end is a random text on standard input: it is read before the
program starts and written after the last test, so that neither an early exit nor anything printed
passes for success. The tests are read before it too, since it may write over their file. (A program
that searches this interpreter's memory for the proof could cheat, or one that returns an object
which equals everything or changes a module that the tests import; program and tests share one
interpreter, as they do in HumanEval.)
"""

import builtins
import os
import sys
from types import CodeType


def _read(path: str) -> CodeType:
    with open(path) as file:  # noqa: PTH123 - no need for pathlib
        return compile(file.read(), path, "exec")


def main() -> None:
    proof, entry = sys.stdin.readline().strip(), sys.stdin.readline().strip()
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # all that is printed counts towards the limit of output
    write, end, run, own = os.write, os._exit, exec, dict(vars(builtins))
    program, tests = _read("program.py"), _read("tests.py")
    names: dict[str, object] = {"__name__": "program"}
    exec(program, names)
    # What the program calls `abs` or `all` must not be what the tests call so.
    kept = {n: value for n, value in names.items() if n == entry or n not in own}
    run(tests, {**kept, "__name__": "tests", "__builtins__": own})
    write(report, proof.encode())
    end(0)


if __name__ == "__main__":
    main()

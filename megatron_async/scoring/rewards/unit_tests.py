"""Runs the program of a response (`program.py`) in the sandbox, then its unit tests (`tests.py`).

This file is copied next to both files. Program and tests run as modules in `sys.modules`, with a
file, as `import` would run them, because dataclasses, pickling and type hints look up a module by
its name. The program's module is named `program` and not `__main__`, so that code that it guards
with `if __name__ == "__main__"` does not run.

The proof that the tests ran to their end is a random text. It is read from standard input before
the program starts and written to standard output after the last test. So a program cannot pass by
exiting early or by printing something. The tests are also read before the program starts, since the
program may overwrite their file. Program and tests share one interpreter, as in HumanEval. So a
program can still cheat: it may search the interpreter's memory for the proof, return an object that
equals everything, or change a module that the tests import.
"""

import builtins
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import CodeType, ModuleType

# Number of stack frames that this file adds below those of the program: its module, `main` and
# `exec`. The recursion limit is raised by it, so that the program has the usual depth.
_FRAMES = 3


def _read(name: str) -> tuple[ModuleType, CodeType]:
    """Register and return an empty module for the file `name`.py, and return its compiled code.

    The code is not executed. Errors of the compiler are raised unchanged.
    """
    path = os.path.abspath(f"{name}.py")  # noqa: PTH100 - no need for pathlib
    spec = spec_from_file_location(name, path)
    if spec is None:
        raise ImportError(f"{path} is not a module")
    with open(path, "rb") as file:  # noqa: PTH123 - bytes, because the file may declare an encoding
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = sys.modules[name] = module_from_spec(spec)
    return module, code


def main() -> None:
    """Run the program, then its tests; if none fails, write the proof of that to standard output.

    Standard input has two lines: the proof, which is a random text, and the name of the tested
    function or class. A failed test raises its exception.
    """
    proof, entry = sys.stdin.readline().strip(), sys.stdin.readline().strip()
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # The program's output goes to standard error; standard output has the proof.
    sys.stdin = open(0)  # noqa: SIM115 - a new file object, whose buffer does not have the proof
    write, end, run, own = os.write, os._exit, exec, dict(vars(builtins))
    (program, program_code), (tests, tests_code) = _read("program"), _read("tests")
    sys.argv = [str(program.__file__)]
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - so that spawned processes find the program
    sys.setrecursionlimit(sys.getrecursionlimit() + _FRAMES)
    exec(program_code, vars(program))
    # Give the tests the names that the program defines, except those of builtins such as `abs`: a
    # program must not replace builtins for the tests. The tested function may have any name.
    shared = {n: v for n, v in vars(program).items() if n == entry or n not in own}
    dunder = {n: v for n, v in vars(tests).items() if n.startswith("__")}
    vars(tests).update({**shared, **dunder, "__builtins__": own})
    run(tests_code, vars(tests))
    write(report, proof.encode())
    end(0)


if __name__ == "__main__":
    main()

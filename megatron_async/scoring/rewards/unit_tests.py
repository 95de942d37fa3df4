"""Runs in the sandbox, next to `program.py` and `tests.py`: the program, then its unit tests.

Both run as modules of `sys.modules`, with a file, as an `import` would run them: dataclasses,
pickling and type hints look their module up by its name. The program is `program` and not
`__main__`, so that what it guards by `if __name__ == "__main__"` does not run.

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
from importlib.util import module_from_spec, spec_from_file_location
from types import CodeType, ModuleType

_FRAMES = 3  # this module's, `main`'s and `exec`'s are beneath the program's own


def _read(name: str) -> tuple[ModuleType, CodeType]:
    """Return the module of `name`.py and its code. Raises the compiler's errors."""
    path = os.path.abspath(f"{name}.py")  # noqa: PTH100 - no need for pathlib
    spec = spec_from_file_location(name, path)
    if spec is None:
        raise ImportError(f"{path} is not a module")
    with open(path, "rb") as file:  # noqa: PTH123 - bytes: the file's own encoding counts
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = sys.modules[name] = module_from_spec(spec)
    return module, code


def main() -> None:
    proof, entry = sys.stdin.readline().strip(), sys.stdin.readline().strip()
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # all that is printed counts toward the limit of output
    sys.stdin = open(0)  # noqa: SIM115 - not the buffer with the proof
    write, end, run, own = os.write, os._exit, exec, dict(vars(builtins))
    (program, program_code), (tests, tests_code) = _read("program"), _read("tests")
    sys.argv = [str(program.__file__)]
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - for processes that multiprocessing spawns
    sys.setrecursionlimit(sys.getrecursionlimit() + _FRAMES)
    exec(program_code, vars(program))
    # What the program calls `abs` or `all` must not be what the tests call so.
    kept = {n: v for n, v in vars(program).items() if n == entry or n not in own}
    dunder = {n: v for n, v in vars(tests).items() if n.startswith("__")}
    vars(tests).update({**kept, **dunder, "__builtins__": own})
    run(tests_code, vars(tests))
    write(report, proof.encode())
    end(0)


if __name__ == "__main__":
    main()

"""The rewards that run programs in the sandbox: `code` (unit tests) and `command` (any checker)."""

import ast
import builtins
import json
import re
import secrets
import shutil
import symtable
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import UserError, short_repr
from megatron_async.scoring.rewards.code_blocks import PYTHON_TAGS, code_candidates
from megatron_async.scoring.rewards.sample import Returned, Sample
from megatron_async.scoring.sandbox import Outcome, Sandbox, SandboxError
from megatron_async.tasks.answers import final_answer

_RUNNER = Path(__file__).with_name("unit_tests.py")
_CHECK = "check"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CANNOT_RUN = (126, 127)
_SHARE = 0.8  # of a score's limit; the rest is for the sandbox to start and to end


def _parts(outcome: Outcome) -> dict[str, float]:
    return {f"exceeded_{outcome.exceeded}": 1.0} if outcome.exceeded else {}


class Code(Settings):
    """1 when the response's Python passes the row's unit tests.

    The row has them as HumanEval does (`test`, which defines `check`, and `entry_point`) or as MBPP
    and MBPP+ do (`test`, or a list `test_list` with `test_imports` or `test_setup_code`). A `test`
    that does not define `check` runs as it stands.
    """

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """The reward. Raises UserError where the sandbox is required and not to be had."""
        sandbox = _sandbox(settings)

        def score(sample: Sample) -> Returned:
            passed, outcome = _tested(sandbox, sample, limit_seconds)
            return float(passed), _parts(outcome)

        return score


def check_code(
    settings: ScorerSettings, limit_seconds: float, samples: Mapping[str, Sample]
) -> None:
    """Check that rows have tests, and that reference solutions pass them: `samples` by their names.

    A sample without a response has no reference. Raises UserError.
    """
    sandbox = _sandbox(settings)
    for name, sample in samples.items():
        try:
            if not sample.response:
                _tests(sample.metadata)
                continue
            passed, outcome = _tested(sandbox, sample, limit_seconds)
        except (RecursionError, MemoryError) as error:  # Python's parser raises either one
            why = "its tests are nested too deeply"
            raise UserError(f"reward is 'code': {name} cannot be scored: {why}") from error
        except (ValueError, SyntaxError, SandboxError) as error:
            raise UserError(f"reward is 'code': {name} cannot be scored: {error}") from error
        if not passed:
            last = outcome.errors.strip().rpartition("\n")[2][:200]
            why = f"more than its limit of {outcome.exceeded}" if outcome.exceeded else last
            raise UserError(
                f"reward is 'code': {name} fails the row's own tests ({why}); a right program runs "
                "`test` as it stands, and `check(entry_point)` where that defines `check`, to the "
                "end; repair the row, or take the column out"
            )


def _tested(sandbox: Sandbox, sample: Sample, limit_seconds: float) -> tuple[bool, Outcome]:
    """Run the row's tests on the response. Raises ValueError for a row without them."""
    tests = _tests(sample.metadata)
    entry = _tested_name(sample.metadata, tests)
    proof = secrets.token_hex(16)
    files = {
        "program.py": _program(sample, entry),
        "tests.py": tests,
        "runner.py": _RUNNER.read_text(),
    }
    command = [sys.executable, "-I", "runner.py"]
    outcome = sandbox.run(command, files, _SHARE * limit_seconds, f"{proof}\n{entry}\n")
    return outcome.output.strip() == proof, outcome


def _program(sample: Sample, entry: str) -> str:
    """Return the program to test: the last block of the response that defines `entry` best.

    Where no block does, the last one is a completion if it defines `entry` when it follows the
    prompt. So prose never stands before a program.
    """
    candidates = code_candidates(sample.response, PYTHON_TAGS)
    code = candidates[-1]
    best = max(reversed(candidates), key=lambda program: _defines(program, entry))
    completed = [f"{sample.prompt}{gap}{code}" for gap in ("", "\n")]
    for program in (best, *completed):
        if _defines(program, entry):
            return program
    return code


def _defines(source: str, name: str) -> int:
    """Return how Python's `source` binds `name` at its top level.

    3: it defines a function or class; 2: it assigns; 1: it imports, as tests of a solution do; 0:
    not at all, or it is not Python.
    """
    try:
        found = symtable.symtable(source, "program", "exec").lookup(name)
    except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError):
        return 0
    if found.is_namespace():
        return 3
    return 2 if found.is_assigned() and not found.is_imported() else int(found.is_imported())


def _tested_name(row: Mapping[str, Any], tests: str) -> str:
    """Return the name by which the tests call the program; empty if they do not show it.

    It is the first name of `entry_point` (of `Solution().twice` it is `Solution`), else the first
    one that the tests call and that neither they nor Python define. MBPP also tests functions with
    the name of a builtin (`assert sum(10, 15) == 6`): then it is an assertion's innermost call.
    """
    entry = re.match(r"\w+", str(row.get("entry_point") or "").strip())
    if entry:
        return entry[0]
    tree = ast.parse(tests)
    for name, _ in _calls(tree):
        if name not in vars(builtins) and not _defines(tests, name):
            return name
    asserted = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    inner = [found for node in asserted for found in _calls(node) if len(_calls(found[1])) == 1]
    return min(inner, key=lambda found: (found[1].lineno, found[1].col_offset), default=("",))[0]


def _calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Return the calls of plain names in `tree`, itself included, with these names."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(call.func.id, call) for call in calls if isinstance(call.func, ast.Name)]


def _tests(row: Mapping[str, Any]) -> str:
    """The row's tests as one program. Raises ValueError or SyntaxError where it has none to run."""
    if row.get("test"):
        [test], entry = _texts(row, "test"), row.get("entry_point")
        names = symtable.symtable(test, "the row's `test`", "exec")
        check = names.lookup(_CHECK) if _CHECK in names.get_identifiers() else None
        if check is None or not (check.is_assigned() or check.is_imported()):
            return _running(test)
        if not entry and not check.is_referenced():
            raise ValueError(
                "the row's `test` defines `check` and nothing calls it: name the function that it "
                "checks in the column `entry_point`"
            )
        return f"{test}\ncheck({entry})\n" if entry else test
    if not row.get("test_list"):
        raise ValueError("the row has no tests: neither a column `test` nor `test_list`")
    columns = ("test_imports", "test_setup_code", "test_list")
    return _running("\n".join(text for column in columns for text in _texts(row, column)))


def _texts(row: Mapping[str, Any], column: str) -> list[str]:
    """The text or, but for `test`, the texts of a column; none where it is empty."""
    value = row.get(column) or []
    if isinstance(value, str):
        return [value]
    several = column != "test" and isinstance(value, list)
    if not several or not all(isinstance(text, str) for text in value):
        raise ValueError(f"the row's `{column}` is {short_repr(value)}, which is no text to run")
    return list(value)


def _running(tests: str) -> str:
    """Return `tests`. Raises ValueError where they only define: any program would pass."""
    for statement in ast.parse(tests).body:
        if isinstance(statement, _DEFINITIONS) or _is_main(statement):
            continue
        if re.match(r"(unittest|pytest)\.main\(", ast.unparse(statement)):
            continue
        if any(isinstance(node, ast.Call | ast.Assert | ast.Raise) for node in ast.walk(statement)):
            return tests
    raise ValueError(
        "the row's tests only define things, so that any program would pass: call them, assert "
        "something, or define `check` (there is no pytest, and no `__main__` for unittest)"
    )


def _is_main(statement: ast.stmt) -> bool:
    """Return whether it is `if __name__ == ...`."""
    names = ast.walk(statement.test) if isinstance(statement, ast.If) else ()
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in names)


class Command(Settings):
    """Score by a program of yours, which reads the response on its standard input.

    It runs in a directory that holds the row as `row.json`. The last line that it prints is the
    score, a number or an object with `score` and named parts; without such a line its exit status
    is: 1 for status 0, else 0.
    """

    command: list[str] = Field(min_length=1)
    """The program and its arguments."""
    send: Literal["response", "answer", "code"] = "response"
    """Of the response: all, the final answer, or the last fenced block not tagged as output."""
    tags: list[str] = Field(default_factory=list)
    """code: language tags of fenced blocks that are preferred, such as [cpp, c++]."""
    readable: list[str] = Field(default_factory=list)
    """Directories that it may read: its own, a toolchain's."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that it needs; PATH is the run's."""
    sandbox: bool = True
    """false: it keeps this user, the network and all files; limits remain."""

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """The reward. Raises UserError for a program that is not there."""
        if shutil.which(self.command[0]) is None:
            raise UserError(
                f"reward command: arguments.command is {self.command}, and {self.command[0]!r} is "
                "not a program on this machine"
            )
        sandbox = _sandbox(settings)

        def score(sample: Sample) -> Returned:
            row = {"prompt": sample.prompt, "answer": sample.answer, **sample.metadata}
            outcome = sandbox.run(
                self.command,
                {"row.json": json.dumps(row)},
                _SHARE * limit_seconds,
                self._sent(sample.response),
                readable=self.readable,
                environment=self.environment,
                apart=self.sandbox,
            )
            if outcome.exit_code in _CANNOT_RUN:
                raise RuntimeError(outcome.errors.strip() or f"{self.command[0]} cannot be run")
            if outcome.exceeded:
                return 0.0, _parts(outcome)
            printed = _printed(outcome.output)
            return float(outcome.exit_code == 0) if printed is None else printed

        return score

    def _sent(self, response: str) -> str:
        if self.send == "answer":
            return final_answer(response) or ""
        return code_candidates(response, self.tags)[-1] if self.send == "code" else response


def _printed(output: str) -> Returned | None:
    """The score in the last line; None where there is none."""
    try:
        found = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return None
    if isinstance(found, dict) and "score" in found:
        return found.pop("score"), found
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _sandbox(settings: ScorerSettings) -> Sandbox:
    sandbox = Sandbox(settings.scoring.sandbox)
    if sandbox.missing:
        print(sandbox.missing, file=sys.stderr)
    return sandbox

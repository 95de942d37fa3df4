"""Provides the rewards that run programs in the sandbox: `code` and `command`.

`code` runs unit tests on the Python program in a response; `command` runs a checker of the user's.
"""

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
# Share of a score's time limit that the program gets. The sandbox starts and ends in the rest.
_SHARE = 0.8


def _components(outcome: Outcome) -> dict[str, float]:
    """Return the component `exceeded_LIMIT` with value 1 if the program exceeded a limit."""
    return {f"exceeded_{outcome.exceeded}": 1.0} if outcome.exceeded else {}


class Code(Settings):
    """Scores 1 if the Python program in the response passes the row's unit tests, else 0.

    The row has the tests in the columns of HumanEval (`test`, which defines `check`, and
    `entry_point`) or of MBPP and MBPP+ (`test`, or a list `test_list` with `test_imports` or
    `test_setup_code`). A `test` that does not define `check` runs unchanged.
    """

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """Return a function that scores one sample by its row's unit tests, in a sandbox.

        The function returns the score, 1 if the tests pass and else 0. If the program exceeded a
        limit, it also returns a component that names this limit.

        Raises:
            UserError: If the sandbox's isolation is required but not available.
        """
        sandbox = _sandbox(settings)

        def score(sample: Sample) -> Returned:
            """Run the row's tests on the response; return 1 if they pass, else 0."""
            passed, outcome = _tested(sandbox, sample, limit_seconds)
            return float(passed), _components(outcome)

        return score


def check_code(
    settings: ScorerSettings, limit_seconds: float, samples: Mapping[str, Sample]
) -> None:
    """Check that each row has unit tests, and that its reference solution passes them.

    Args:
        settings: The settings, with the limits of the sandbox.
        limit_seconds: Time limit of one score.
        samples: The rows with their reference solutions as responses, by a description of the row.
            An empty response means that the row has no reference solution.

    Raises:
        UserError: If a row has no usable tests, or its reference solution fails them.
    """
    sandbox = _sandbox(settings)
    for name, sample in samples.items():
        try:
            if not sample.response:
                _tests(sample.metadata)
                continue
            passed, outcome = _tested(sandbox, sample, limit_seconds)
        except (RecursionError, MemoryError) as error:  # Python's parser raises either of them.
            why = "its tests are nested too deeply"
            raise UserError(f"reward is 'code': {name} cannot be scored: {why}") from error
        except (ValueError, SyntaxError, SandboxError) as error:
            raise UserError(f"reward is 'code': {name} cannot be scored: {error}") from error
        if not passed:
            last = outcome.errors.strip().rpartition("\n")[2][:200]
            why = f"it exceeded the limit of {outcome.exceeded}" if outcome.exceeded else last
            raise UserError(
                f"reward is 'code': {name} fails the row's own tests ({why}). A correct program "
                "runs `test` unchanged to its end, and then `check(entry_point)` if `test` defines "
                "`check`. Correct the row, or remove the column."
            )


def _tested(sandbox: Sandbox, sample: Sample, limit_seconds: float) -> tuple[bool, Outcome]:
    """Run the row's unit tests on the program in the response, in the sandbox.

    Returns:
        Whether the tests ran to their end without an error, and the outcome of the run.

    Raises:
        ValueError: If the row has no usable tests.
        SyntaxError: If the row's tests are not valid Python.
    """
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
    """Return the Python program in the response: the code block that best defines the name `entry`.

    `_defines` tells how well; of equally good blocks the last one is returned. If no block defines
    `entry`, the response may be a completion of the prompt. So if the prompt followed by the last
    block defines `entry`, both together are returned. Otherwise the last block is returned. A block
    that defines `entry` by itself is never combined with the prompt.
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
    """Return how well the Python text `source` defines `name` at its top level, from 0 to 3.

    Returns:
        3 if it defines a function or class with that name; 1 if it imports the name, as a block
        with tests of the solution may do; 2 if it only assigns the name; 0 if it does none of these
        or is not Python.
    """
    try:
        found = symtable.symtable(source, "program", "exec").lookup(name)
    except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError):
        return 0
    if found.is_namespace():
        return 3
    return 2 if found.is_assigned() and not found.is_imported() else int(found.is_imported())


def _tested_name(row: Mapping[str, Any], tests: str) -> str:
    """Return the name of the function or class that a row's tests test; empty if they show none.

    These rules are tried in order:
    - The first word of the column `entry_point`, such as `Solution` in `Solution().twice`.
    - The first name that the tests call and that is neither a builtin nor defined by the tests.
    - The name in the first call of an assertion that contains no other call. MBPP has solutions
      with the name of a builtin, which are found this way, as in `assert sum(10, 15) == 6`.
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
    """Return all calls of plain names in a syntax tree, as pairs of the name and the call.

    The root of the tree is included, if it is such a call.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(call.func.id, call) for call in calls if isinstance(call.func, ast.Name)]


def _tests(row: Mapping[str, Any]) -> str:
    """Return the unit tests of a row of the data as one Python program.

    Raises:
        ValueError: If the row has no tests, or tests that no program can fail.
        SyntaxError: If the tests are not valid Python.
    """
    if row.get("test"):
        [test], entry = _texts(row, "test"), row.get("entry_point")
        names = symtable.symtable(test, "the row's `test`", "exec")
        check = names.lookup(_CHECK) if _CHECK in names.get_identifiers() else None
        if check is None or not (check.is_assigned() or check.is_imported()):
            return _running(test)
        if not entry and not check.is_referenced():
            raise ValueError(
                "the row's `test` defines `check` and nothing calls it. Put the name of the "
                "function that `check` tests into the column `entry_point`."
            )
        return f"{test}\ncheck({entry})\n" if entry else test
    if not row.get("test_list"):
        raise ValueError("the row has no tests: it has neither a column `test` nor `test_list`")
    columns = ("test_imports", "test_setup_code", "test_list")
    return _running("\n".join(text for column in columns for text in _texts(row, column)))


def _texts(row: Mapping[str, Any], column: str) -> list[str]:
    """Return the texts in a column of a row, as a list; empty if the column is empty.

    A column with a single text gives one element. Only columns other than `test` may hold a list.

    Raises:
        ValueError: If the column holds any other value.
    """
    value = row.get(column) or []
    if isinstance(value, str):
        return [value]
    several = column != "test" and isinstance(value, list)
    if not several or not all(isinstance(text, str) for text in value):
        raise ValueError(f"the row's `{column}` is {short_repr(value)}, which is not a text to run")
    return list(value)


def _running(tests: str) -> str:
    """Return a row's test program `tests` unchanged if it runs at least one test.

    Raises:
        ValueError: If it runs no test, for example because it only defines functions or classes.
            Any program would pass such tests.
    """
    for statement in ast.parse(tests).body:
        if isinstance(statement, _DEFINITIONS) or _is_main(statement):
            continue
        if re.match(r"(unittest|pytest)\.main\(", ast.unparse(statement)):
            continue
        if any(isinstance(node, ast.Call | ast.Assert | ast.Raise) for node in ast.walk(statement)):
            return tests
    raise ValueError(
        "the row's tests only define things, so that any program would pass. Call them, assert "
        "something, or define `check`; neither pytest nor unittest's `__main__` runs them."
    )


def _is_main(statement: ast.stmt) -> bool:
    """Return whether `statement` is an `if` whose condition uses `__name__`."""
    names = ast.walk(statement.test) if isinstance(statement, ast.If) else ()
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in names)


class Command(Settings):
    """Scores a response by a program of yours, which reads the response from standard input.

    The program runs in a directory with the row as `row.json`. The last line that the program
    prints is the score: a number, or a JSON object with `score` and named components. Without such
    a line the score is 1 if the exit status is 0, else 0.
    """

    command: list[str] = Field(min_length=1)
    """The program and its arguments."""
    send: Literal["response", "answer", "code"] = "response"
    """Input of the program: the whole response, its final answer, or its code (the last fenced
    block that is not tagged as output)."""
    tags: list[str] = Field(default_factory=list)
    """Language tags of fenced blocks to prefer with `send: code`, such as [cpp, c++]."""
    readable: list[str] = Field(default_factory=list)
    """Additional directories that the program may read, such as its own or a toolchain's."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of the program; PATH is always that of the run."""
    sandbox: bool = True
    """Whether to isolate the program. false: it runs as this user, with access to the network and
    all files; the limits still apply."""

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """Return a function that scores one sample by running the program `command` in a sandbox.

        Raises:
            UserError: If the program does not exist, or the sandbox's isolation is required but
                not available.
        """
        if shutil.which(self.command[0]) is None:
            raise UserError(
                f"reward command: arguments.command is {self.command}; {self.command[0]!r} is "
                "not a program on this machine. Install it, or give its path."
            )
        sandbox = _sandbox(settings)

        def score(sample: Sample) -> Returned:
            """Run the program on one response; return the score that it prints, or exits with."""
            row = {"prompt": sample.prompt, "answer": sample.answer, **sample.metadata}
            outcome = sandbox.run(
                self.command,
                {"row.json": json.dumps(row)},
                _SHARE * limit_seconds,
                self._sent(sample.response),
                readable=self.readable,
                environment=self.environment,
                isolated=self.sandbox,
            )
            if outcome.exit_code in _CANNOT_RUN:
                raise RuntimeError(outcome.errors.strip() or f"cannot run {self.command[0]}")
            if outcome.exceeded:
                return 0.0, _components(outcome)
            printed = _printed(outcome.output)
            return float(outcome.exit_code == 0) if printed is None else printed

        return score

    def _sent(self, response: str) -> str:
        """Return the text of the response that the program reads, as the setting `send` chooses."""
        if self.send == "answer":
            return final_answer(response) or ""
        return code_candidates(response, self.tags)[-1] if self.send == "code" else response


def _printed(output: str) -> Returned | None:
    """Return the score in the last line of a program's output; None if there is no score.

    The line is a number, or a JSON object with `score` and named components.
    """
    try:
        found = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return None
    if isinstance(found, dict) and "score" in found:
        return found.pop("score"), found
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _sandbox(settings: ScorerSettings) -> Sandbox:
    """Return a new sandbox; log a message if some of its isolation is missing on this machine.

    Raises:
        UserError: If the isolation is required but not available.
    """
    sandbox = Sandbox(settings.scoring.sandbox)
    if sandbox.missing:
        print(sandbox.missing, file=sys.stderr)
    return sandbox

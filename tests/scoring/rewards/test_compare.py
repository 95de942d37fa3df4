"""Tests the rewards `exact`, `regex` and `math`, and `task` with the answers of a file."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.scoring.rewards.reward import build_reward
from megatron_async.scoring.rewards.sample import RewardScore, Sample


def score(name: str, answer: str, response: str, **arguments: Any) -> RewardScore:
    """Return the score that the reward `name` gives a response, for a row with this answer."""
    settings = build_config({"reward": {"name": name, "arguments": arguments}}).scorers
    (found,) = build_reward(settings, settings.parts[0]).score([Sample(response, answer=answer)])
    return found


def test_exact_compares_only_the_final_answer() -> None:
    assert score("exact", "New  York", "I think <answer>New York</answer>").value == 1
    assert score("exact", "4", r"So \boxed{4}.").value == 1
    assert score("exact", "4", "<think>5</think>4").value == 1
    assert score("exact", "4", "44").value == 0
    assert score("exact", "4", "").parts["answered"] == 0
    assert score("exact", "B", "#b").value == 0
    assert score("exact", "B", "#b", answer_marker="#", ignore_case=True).value == 1


@pytest.mark.parametrize(
    ("reference", "text", "reward"),
    [
        ("1/2", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"thus \boxed{\frac{2}{4}}", 1.0),
        ("3", r"\boxed{4}", 0.0),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
        ("3", "no number", 0.0),
    ],
)
def test_math_compares_mathematical_values(reference: str, text: str, reward: float) -> None:
    assert score("math", reference, text).value == reward


def test_math_logs_no_warning_about_missing_time_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("math_verify.parser", "math_verify.grader"):
        monkeypatch.setattr(f"{module}.TIMEOUT_WARNING_SHOWN", False)
    assert score("math", "1/2", "0.5").value == 1.0
    assert caplog.text == ""


def test_regex_finds_pattern_or_compares_captured_answer() -> None:
    form = r"^<think>.*</think>\s*<answer>.*</answer>$"
    assert score("regex", "", "<think>a\nb</think>\n<answer>4</answer>", pattern=form).value == 1
    assert score("regex", "", "4", pattern=form).value == 0
    last = r"answer is (?P<answer>-?\d+)"
    assert score("regex", "7", "The answer is 3. No: the answer is 7", pattern=last).value == 1
    assert score("regex", "7", "The answer is 7. No: the answer is 3", pattern=last).value == 0


def test_task_scores_with_checker_of_task_name_when_rows_are_from_file() -> None:
    task = {"kind": "files", "name": "math", "path": "unused", "answer_marker": "#"}
    settings = build_config({"task": task}).scorers
    reward = build_reward(settings, settings.parts[0])
    (right,) = reward.score([Sample("#0.5", answer="1/2", payload={"answer": "1/2"})])
    assert right.value == 1.0 and right.parts == {"score": 1.0, "answered": 1.0}

"""Tests the metrics and warnings that the train loop writes for a step in addition to the trainer's
own metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.rollout.evaluate import Evaluation
from megatron_async.train_loop.loop import TrainLoop
from megatron_async.trainer.step import StepReport
from tests.trainer.cases import ragged_batch

ERRORS = {"mean_error": 0.011, "max_error": 0.2, "drift": 1.5}


def loop_with(metrics: SimpleNamespace) -> Any:
    return TrainLoop(
        config=None,  # type: ignore[arg-type]
        trainer=SimpleNamespace(step=0),  # type: ignore[arg-type]
        publisher=None,  # type: ignore[arg-type]
        checkpoints=None,  # type: ignore[arg-type]
        link=None,
        metrics=metrics,  # type: ignore[arg-type]
    )


def written(update: dict[str, float]) -> dict[str, float]:
    lines: list[dict[str, float]] = []
    loop = loop_with(SimpleNamespace(write=lambda _step, values: lines.append(values)))
    report = StepReport(1, 0.5, 1.0, 1e-3, 1, 0, False, None, 40, 30, 2, 1.0)
    loop._update_metrics |= update
    loop._write(ragged_batch(), report)
    assert loop._update_metrics == {}, "the next step would repeat them"
    [line] = lines
    return line


def test_step_line_has_probe_errors_only_when_weights_were_verified() -> None:
    """Steps whose update was not verified have a gap in the curve of probe errors."""
    errors = {f"weights/probe_{name}": value for name, value in ERRORS.items()}
    line = written(errors)
    assert {name: line[name] for name in errors} == errors
    without = written({})
    assert not [name for name in without if name.startswith("weights/probe")]


def warnings_of(**counts: int) -> list[tuple[int, str, str]]:
    """Return the warnings of an evaluation of version 3 on the set `hard` that has these counts."""
    warnings: list[tuple[int, str, str]] = []
    metrics = SimpleNamespace(write=lambda *_, **__: None, samples=lambda *_: None)
    metrics.warn = lambda *warning: warnings.append(warning)
    result: Any = SimpleNamespace(name="hard", reward_max=1.0, samples=(), metrics=dict, **counts)
    loop_with(metrics)._write_evaluations([Evaluation((result,), 3)])
    return warnings


@pytest.mark.parametrize(
    ("failed", "of", "warned"), [(0, 9, False), (1, 101, False), (2, 200, True)]
)
def test_train_loop_warns_when_evaluation_responses_have_no_score(
    failed: int, of: int, warned: bool
) -> None:
    warnings = warnings_of(responses=of, score_failures=failed, refused=0)
    assert [(step, name) for step, name, _ in warnings] == [(3, "unscored_answers")] * warned
    assert all(
        f"{failed} of {of} responses to evaluation set hard could not be scored" in w
        for _, _, w in warnings
    )


def test_train_loop_warns_of_refused_prompts_instead_of_the_scorer() -> None:
    ((step, name, message),) = warnings_of(responses=9, score_failures=0, refused=4)
    assert (step, name) == (3, "refused_eval_prompts")
    assert (
        "4 of 9 responses to evaluation set hard are missing" in message and "too long" in message
    )

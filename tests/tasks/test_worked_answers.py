"""Worked answers are right, step by step, and of the two kinds that were asked for."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.chain_sum import (
    ChainSums,
    chain_sum_direct,
    chain_sum_full,
)
from megatron_async.tasks.procedural import ProceduralProblems, ProceduralScorer

NUMBERS = st.integers(0, 999)
CHAINS = st.tuples(NUMBERS, st.lists(st.tuples(st.sampled_from("+-"), NUMBERS), max_size=20))


def _text(chain: tuple[int, list[tuple[str, int]]]) -> str:
    head, steps = chain
    return " ".join([str(head), *(f"{op} {number}" for op, number in steps)])


@given(CHAINS)
def test_every_step_is_true_and_the_last_is_the_answer(
    chain: tuple[int, list[tuple[str, int]]],
) -> None:
    expression = _text(chain)
    steps, _, answer = chain_sum_full(expression).partition("#")
    written = [step for step in steps.split(";") if step]
    assert len(written) == len(chain[1])
    for step in written:
        left, _, right = step.partition("=")
        assert eval(left) == int(right)
    assert int(answer) == eval(re.sub(r"\b0+(\d)", r"\1", expression))


def test_the_forms_are_the_documented_ones() -> None:
    assert chain_sum_full("4 - 1 + 2") == "4-1=3;3+2=5#5"
    assert chain_sum_direct("4 - 1 + 2") == "#5"
    assert chain_sum_full("7") == "#7"


@pytest.mark.parametrize("text", ["", "-1 + 2", "3 * 4", "1 + ", "1 + x"])
def test_what_is_no_chain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a chain of sums"):
        chain_sum_full(text)


def test_the_share_of_direct_answers_is_the_one_asked_for() -> None:
    sums = ChainSums(seed=1, direct_share=0.3)
    texts = [sums.worked_answer("4 - 1 + 2", seed) for seed in range(4000)]
    assert set(texts) == {"#5", "4-1=3;3+2=5#5"}
    assert 0.27 < texts.count("#5") / 4000 < 0.33
    assert texts == [sums.worked_answer("4 - 1 + 2", seed) for seed in range(4000)]


def test_a_share_of_more_than_everything_is_refused() -> None:
    with pytest.raises(UserError, match=r"direct_share must be from 0 to 1, got 1\.7"):
        ProceduralProblems(TaskConfig(params={"direct_share": 1.7}))


def test_the_scorer_gives_every_worked_answer_full_score() -> None:
    config = TaskConfig(answer_marker="#", params={"direct_share": 0.3})
    scorer = ProceduralScorer(config)
    for problem, text in ProceduralProblems(config).worked(300):
        assert scorer.score(problem.payload, text)[0] == 1.0

"""Tests procedural tasks and seeds: fixed order, held-out problems, scores and settings."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.config import build_config
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.base import is_heldout
from megatron_async.tasks.build import build_source
from megatron_async.tasks.chain_sum import (
    ChainSums,
    chain_sum_direct,
    chain_sum_full,
)
from megatron_async.tasks.procedural import ProceduralProblems, ProceduralScorer
from tests.wanted import needs

needs_reasoning_gym = needs(
    find_spec("reasoning_gym"),
    "launch/requirements-tasks.txt, which needs a C compiler",
    "MEGATRON_ASYNC_REASONING_GYM",
)
MIXTURE = [
    {"weight": 0.7, "min_terms": 2, "max_terms": 3},
    {"weight": 0.3, "min_terms": 4, "max_terms": 9},
]


def _config(**changes: Any) -> TaskConfig:
    settings = {
        "params": {"min_digits": 1, "max_digits": 1, "mixture": MIXTURE},
        "answer_marker": "#",
        **changes,
    }
    return TaskConfig.model_validate(settings)


def _expression(question: str) -> str:
    return question.removesuffix(" =").rpartition(": ")[2]


PROBLEMS = ProceduralProblems(_config())
SCORER = ProceduralScorer(_config())


@given(st.integers(0, 10**7))
@settings(max_examples=60)
def test_procedural_problem_depends_only_on_settings_and_index(index: int) -> None:
    assert PROBLEMS.train(index) == ProceduralProblems(_config()).train(index)


def test_procedural_problems_differ_when_train_seed_differs() -> None:
    other = ProceduralProblems(_config(train_seed=2))
    same = sum(PROBLEMS.train(i).question == other.train(i).question for i in range(200))
    assert same < 40, "only the shortest problems coincide by chance"


@pytest.mark.parametrize("train_seed", [1, 2, 1_000_003])
def test_procedural_training_problems_are_never_held_out_ones(train_seed: int) -> None:
    problems = ProceduralProblems(_config(train_seed=train_seed))
    heldout = {p.question for p in problems.heldout(300)}
    assert len(heldout) == 300
    trained = {problems.train(i).question for i in range(4000)}
    trained |= {p.question for p, _ in problems.worked(4000)}
    assert not heldout & trained
    assert not any(is_heldout(question, 0.1) for question in trained)


def test_procedural_held_out_problems_do_not_depend_on_their_count() -> None:
    assert PROBLEMS.heldout(40) == PROBLEMS.heldout(90)[:40]


def test_mixture_draws_its_components_by_weight() -> None:
    short = sum(int(PROBLEMS.train(i).fields["num_terms"]) <= 3 for i in range(2000))
    assert 0.63 < short / 2000 < 0.75


def test_chain_sum_scorer_accepts_payload_when_it_went_through_json() -> None:
    for index in range(50):
        problem = PROBLEMS.train(index)
        payload = json.loads(json.dumps(problem.payload))
        total = eval(_expression(problem.question))
        assert SCORER.score(payload, f"1+1=2#{total}")[0] == 1.0
        assert SCORER.score(payload, f"#{total + 1}")[0] == 0.0
        assert SCORER.score(payload, f"{total}")[1] == {"score": 0.0, "answered": 0.0}


@needs_reasoning_gym
@pytest.mark.parametrize(
    "arguments",
    [
        {"min_terms": 1, "max_terms": 18, "min_digits": 1, "max_digits": 1},
        {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 4},
    ],
)
def test_chain_sum_equals_reasoning_gym_in_problems_and_scores(
    arguments: dict[str, int],
) -> None:
    import reasoning_gym

    theirs = reasoning_gym.create_dataset("chain_sum", seed=7, size=300, **arguments)
    ours = ChainSums(seed=7, **arguments)
    for index in range(300):
        expected, found = theirs[index], ours[index]
        assert (found["question"], found["answer"]) == (expected["question"], expected["answer"])
        assert found["metadata"].items() <= expected["metadata"].items()
        right = found["answer"]
        for answer in (right, f"+{right}", f"{right}.0", f"0{right}", f"{right}x", "1,000", "x"):
            full = theirs.score_answer(answer, expected) >= 1
            assert ours.score_answer(answer, found) == float(full), (answer, right)


@needs_reasoning_gym
def test_reasoning_gym_partial_credit_counts_when_full_score_only_is_false() -> None:
    gym = {"kind": "reasoning_gym", "name": "chain_sum"}
    problems = ProceduralProblems(_config(**gym))
    problem = next(p for p in map(problems.train, range(1000)) if len(p.payload["answer"]) == 1)
    text = "#" + problem.payload["answer"] + "x"
    strict = ProceduralScorer(_config(**gym)).score(problem.payload, text)
    lenient = ProceduralScorer(_config(**gym, full_score_only=False)).score(problem.payload, text)
    assert strict == (0.0, {"score": 0.5, "answered": 1.0})
    assert lenient[0] == 0.5


def test_error_names_package_extra_when_reasoning_gym_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # type: ignore[arg-type]
    assert ProceduralProblems(_config()).train(0)
    with pytest.raises(UserError, match=r"reasoning_gym is not installed.*\[reasoning-gym\]"):
        ProceduralProblems(_config(kind="reasoning_gym", name="letter_counting"))


def test_procedural_scorer_raises_when_payload_is_of_other_settings() -> None:
    problem = PROBLEMS.train(3)
    with pytest.raises(ValueError, match="made another problem"):
        SCORER.score({**problem.payload, "answer": "123456"}, "#1")


@needs_reasoning_gym
def test_reasoning_gym_task_scores_responses_but_has_no_worked_answers() -> None:
    config = TaskConfig(kind="reasoning_gym", name="letter_counting")
    problems = ProceduralProblems(config)
    problem = problems.train(0)
    scorer = ProceduralScorer(config)
    right = f"<think>hm</think> <answer>{problem.payload['answer']}</answer>"
    assert scorer.score(problem.payload, right)[0] == 1.0
    with pytest.raises(UserError, match=r"letter_counting has no worked answers.*sft\.data"):
        problems.worked(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"kind": "reasoning_gym", "name": "chain_sums"},
            "'chain_sums' is not a task of reasoning-gym",
            marks=needs_reasoning_gym,
        ),
        ({"kind": "reasoning_gym", "name": "game_of_life_halting"}, "full score to every answer"),
        (
            {"params": {"min_term": 2}},
            r"task\.params\.min_term is not .* max_digits, max_terms, min_",
        ),
        (
            {"params": {"min_terms": 5, "max_terms": 2}},
            "max_terms must be at least min_terms, got 2",
        ),
        ({"params": {"min_terms": 0}}, "min_terms must be at least 1, got 0"),
        ({"kind": "reasoning_gym"}, r"task\.name is empty"),
        ({"params": {"max_digits": "3"}}, "max_digits must be an integer, got '3'"),
        pytest.param(
            {
                "kind": "reasoning_gym",
                "name": "chain_sum",
                "params": {"min_terms": 5, "max_terms": 2},
            },
            "max_terms must be >= min_terms",
            marks=needs_reasoning_gym,
        ),
        ({"params": {"direct_share": 1.7}}, r"direct_share must be from 0 to 1, got 1\.7"),
        ({"params": {"seed": 5}}, "may not set 'seed'"),
        ({"params": {"mixture": []}}, r"task\.params\.mixture must be a list"),
        ({"params": {"mixture": [{"min_terms": 2}]}}, "needs a positive `weight`"),
    ],
)
def test_procedural_problems_are_refused_when_task_settings_are_invalid(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ProceduralProblems(_config(**changes))


def test_procedural_heldout_raises_when_there_are_too_few_problems() -> None:
    tiny = _config(params={"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1})
    with pytest.raises(UserError, match=r"different held-out problems.*eval\.prompts is 50"):
        ProceduralProblems(tiny).heldout(50)


NUMBERS = st.integers(0, 999)
CHAINS = st.tuples(NUMBERS, st.lists(st.tuples(st.sampled_from("+-"), NUMBERS), max_size=20))


def _text(chain: tuple[int, list[tuple[str, int]]]) -> str:
    head, steps = chain
    return " ".join([str(head), *(f"{op} {number}" for op, number in steps)])


@given(CHAINS)
def test_chain_sum_full_has_true_steps_and_ends_with_the_answer(
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


def test_chain_sum_worked_answers_have_the_documented_forms() -> None:
    assert chain_sum_full("4 - 1 + 2") == "4-1=3;3+2=5#5"
    assert chain_sum_direct("4 - 1 + 2") == "#5"
    assert chain_sum_full("7") == "#7"


@pytest.mark.parametrize("text", ["", "-1 + 2", "3 * 4", "1 + ", "1 + x"])
def test_chain_sum_full_raises_when_text_is_not_a_chain_of_sums(text: str) -> None:
    with pytest.raises(ValueError, match="is not a chain of sums"):
        chain_sum_full(text)


def test_chain_sum_share_of_direct_answers_equals_direct_share() -> None:
    sums = ChainSums(seed=1, direct_share=0.3)
    texts = [sums.worked_answer("4 - 1 + 2", seed) for seed in range(4000)]
    assert set(texts) == {"#5", "4-1=3;3+2=5#5"}
    assert 0.27 < texts.count("#5") / 4000 < 0.33
    assert texts == [sums.worked_answer("4 - 1 + 2", seed) for seed in range(4000)]


def test_procedural_scorer_gives_full_score_to_every_worked_answer() -> None:
    config = TaskConfig(answer_marker="#", params={"direct_share": 0.3})
    scorer = ProceduralScorer(config)
    for problem, text in ProceduralProblems(config).worked(300):
        assert scorer.score(problem.payload, text)[0] == 1.0


def test_seed_problems_are_reproducible_and_disjoint_from_held_out_ones() -> None:
    source = build_source(TaskConfig(kind="seeds", heldout_share=0.3))
    again = build_source(TaskConfig(kind="seeds", heldout_share=0.3))
    train = [source.train(index) for index in range(300)]
    heldout = source.heldout(100)
    assert [again.train(index) for index in range(300)] == train
    assert again.heldout(100) == heldout
    seeds = [{problem.payload["metadata"]["seed"] for problem in side} for side in (train, heldout)]
    assert len(seeds[0]) == 300
    assert len(seeds[1]) == 100
    assert not seeds[0] & seeds[1]
    assert source.counts(7) == (None, 7)


def test_seed_problems_refuse_all_held_out_rows_since_they_are_endless() -> None:
    with pytest.raises(UserError, match="generates rows endlessly"):
        build_source(TaskConfig(kind="seeds")).heldout(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": {"kind": "seeds"}}, "set environment.name"),
        ({"environment": {"name": "Guess"}}, "environment.name is 'Guess'; it must be"),
        ({"episode": {"max_turns": 3}}, "episode.max_turns is set, but"),
    ],
)
def test_build_config_is_refused_when_environment_settings_do_not_fit(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_config(settings)

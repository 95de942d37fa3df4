"""Tests evaluation: named sets, estimates from several responses, samples, request names and
episodes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config import RunConfig
from megatron_async.config.environment import EpisodeConfig
from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import GenerationRequest, RequestRefused, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.environments.worker import EpisodeStart, StepResult
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.rollout.episodes import play
from megatron_async.rollout.evaluate import (
    Estimate,
    EvalResponse,
    Evaluation,
    Evaluator,
    estimates,
    majority_is_right,
    pass_at_k,
)
from megatron_async.rollout.responses import EnginePool, ResponseSpec
from megatron_async.rollout.scoring import conversation_of
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.tasks import build_task
from megatron_async.trajectory.types import PolicyVersion, Prompt, RequestKey
from tests.environments.inside import InProcessBackend
from tests.rollout.episode_runs import configured
from tests.rollout.stand_ins import Fixed

VERSION = PolicyVersion(0, 0)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(
    samples: int, data: st.DataObject
) -> None:
    solved, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    draws = list(itertools.combinations([True] * solved + [False] * (samples - solved), k))
    assert pass_at_k(samples, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_majority_ignores_responses_without_an_answer() -> None:
    assert majority_is_right(["4", None, None, None, "4"], [True, False, False, False, True])
    assert not majority_is_right(["4", "5", "5"], [True, False, False])
    assert majority_is_right(["4", "5"], [True, False])
    assert not majority_is_right([None], [False])


def test_confidence_interval_is_wilsons_and_not_empty() -> None:
    # Agresti and Coull 1998: 0 of 20 gives an upper end of 0.161.
    none = Estimate.of([0.0] * 20)
    assert (none.value, none.low) == (0, 0) and none.high == pytest.approx(0.161, abs=5e-4)
    half = Estimate.of([0.0, 1.0] * 200)
    assert half.value == 0.5 and half.high - half.low == pytest.approx(2 * 0.049, abs=1e-3)
    # The same mean has a narrower interval if every problem is solved about half the time.
    assert Estimate.of([0.4, 0.6] * 200).high - 0.5 < 0.02


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_estimate_is_within_its_confidence_interval(values: list[float]) -> None:
    found = Estimate.of(values)
    assert 0 <= found.low <= found.value + 1e-9 and found.value - 1e-9 <= found.high <= 1


def answered(*texts: str, right: str) -> list[EvalResponse]:
    return [EvalResponse(text, float(text == right), {}, len(text), False) for text in texts]


def test_estimates_include_pass_and_majority_when_samples_are_several() -> None:
    found = estimates(
        [
            answered("4", "4", "5", "4", right="4"),
            answered("7", "7", "8", "9", right="9"),
        ],
        1.0,
        "",
    )
    assert list(found) == ["accuracy", "pass_at_2", "pass_at_4", "maj_at_4"]
    assert found["accuracy"].value == 0.5
    assert found["pass_at_2"].value == pytest.approx((1 + 0.5) / 2)
    assert (found["pass_at_4"].value, found["maj_at_4"].value) == (1.0, 0.5)


class Echo:
    """Engine that repeats the last token of the prompt up to the limit of the request."""

    engine_id = "echo"

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        ids = np.repeat(request.input_ids[-1:], request.max_new_tokens)
        yield TokenChunk(ids, np.zeros(len(ids), np.float32), PolicyVersion(0, 0), "length")


class Sets(Fixed):
    """Task whose prompts contain the name of their set; responses to odd prompts are right."""

    def eval_prompts(self, count: int, name: str = "heldout") -> list[Prompt]:
        return [
            Prompt(np.array([len(name), i], np.int32), name, {"question": f"{name} {i}"})
            for i in range(count or 5)
        ]

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        return float(response_ids[0] % 2), {"part": 0.5}


def pool_of(engine: Echo) -> EnginePool:
    return EnginePool(lambda: [engine])  # type: ignore[list-item]


def evaluated(**settings: Any) -> tuple[Evaluation, Echo]:
    config = RunConfig.model_validate({"eval": settings, "sampling": {"max_new_tokens": 3}})
    engine, task = Echo(), Sets()
    evaluator = Evaluator(config, task, task)  # type: ignore[arg-type]
    return asyncio.run(evaluator.evaluate(pool_of(engine), VERSION)), engine


def test_evaluation_sets_have_separate_settings_and_metrics() -> None:
    aime = {"path": "unused", "samples": 4, "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 7}
    found, engine = evaluated(prompts=4, save_samples=1, sets={"aime": aime})
    metrics = found.metrics()
    assert (metrics["eval/accuracy"], metrics["eval/responses"]) == (0.5, 4)
    assert (metrics["eval/aime/accuracy"], metrics["eval/aime/responses"]) == (0.4, 20)
    assert metrics["eval/aime/pass_at_4"] == 0.4 and metrics["eval/aime/length_max"] == 7
    assert metrics["eval/aime/accuracy_low"] < 0.4 < metrics["eval/aime/accuracy_high"]
    by_length = {r.max_new_tokens: r.sampling for r in engine.requests}
    assert (by_length[3].top_k, by_length[3].top_p) == (1, 1.0)
    assert (by_length[7].temperature, by_length[7].top_p) == (0.6, 0.95)
    assert [sample["question"] for sample in found.samples()] == ["heldout 0"] + ["aime 0"] * 4
    assert found.samples()[0]["parts"] == {"part": 0.5}
    assert found.samples()[0]["prompt"] == Sets().text([7, 0]), "the prompt is not the model's"
    assert (metrics["eval/reward_mean"], metrics["eval/reward_max"]) == (0.5, 1.0)
    assert (metrics["eval/temperature"], metrics["eval/aime/temperature"]) == (0.0, 0.6)
    assert "aime: accuracy 40.0 % (" in found.results[1].message()
    assert ", temperature 0.6; mean reward 0.400; 20 responses, " in found.results[1].message()


def test_message_names_solved_at_when_no_reward_reaches_it() -> None:
    result = evaluated(prompts=4, solved_at=1.5)[0].results[0]
    assert (result.accuracy, result.reward_mean) == (0.0, 0.5)
    assert "the largest reward is 1, below eval.solved_at 1.5" in result.message()
    assert "below" not in evaluated(prompts=4)[0].results[0].message()


def test_only_named_sets_exist_when_no_problem_is_held_out() -> None:
    config = RunConfig.model_validate(
        {
            "task": {"path": "a", "heldout_share": 0, "name": "exact"},
            "eval": {"sets": {"aime": {"path": "b"}}},
        }
    )
    assert [one.name for one in config.eval_sets()] == ["aime"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sets": {"heldout": {"path": "a"}}}, "eval.sets has the name 'heldout'"),
        ({"sets": {"a b": {"path": "a"}}}, "eval.sets has the name 'a b'"),
        ({"sets": {"a": {}}}, "an evaluation set has no path"),
        ({"sets": {"a": {"path": "a", "temperature": 1e-9}}}, "eval.sets.a.temperature must be 0"),
        ({"top_k": 1}, r"eval.top_k must be -1 \(all tokens\) or at least 2"),
    ],
)
def test_eval_settings_are_refused_when_they_are_invalid(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        RunConfig.model_validate({"eval": settings})


def test_group_reward_gets_all_responses_to_an_evaluation_problem() -> None:
    class Groups(Sets):
        async def score_group(
            self, prompt: Prompt, responses: Sequence[Sequence[int]]
        ) -> list[tuple[float | None, dict[str, float]]]:
            return [(float(index == 0), {}) for index in range(len(responses))]

    settings_ = {"eval": {"prompts": 3, "samples": 4}, "reward": {"name": "exact", "group": True}}
    config = RunConfig.model_validate(settings_)
    task = Groups()
    evaluator = Evaluator(config, task, task)  # type: ignore[arg-type]
    (result,) = asyncio.run(evaluator.evaluate(pool_of(Echo()), VERSION)).results
    assert (result.accuracy, result.responses) == (0.25, 12)


class Abandons:
    """Environment of two turns whose program never gets the response of the second turn."""

    async def begin(
        self, number: int, payload: Mapping[str, Any], input_budget: int | None
    ) -> EpisodeStart:
        return EpisodeStart(({"role": "user", "content": "a"},), np.array([7], np.int32), None)

    async def step(self, *of_episode: Any, **named: Any) -> StepResult:
        turn = of_episode[2][-1].number
        answer = {"text": str(turn), "truncated": False}
        if turn:
            return StepResult(answer, 1.0, ended="stop", abandoned=(1,))
        messages = ({"role": "user", "content": "b"},)
        return StepResult(answer, 0.0, messages, np.array([8], np.int32))

    async def forget(self, number: int) -> None:
        return None


def test_turn_is_left_out_of_an_evaluation_when_the_agent_never_got_it() -> None:
    wanted = ResponseSpec(SamplingConfig(), 2, (1,))
    engines = EnginePool(lambda: [Echo()])  # type: ignore[list-item]
    found = asyncio.run(
        play(Abandons(), 0, {}, wanted, "e", engines, EpisodeConfig(), None)  # type: ignore[arg-type]
    )
    assert found is not None
    assert [turn.abandoned for turn in found.turns] == [False, True]
    assert found.token_ids == [7, 7], "another response was scored"
    assert [m["content"] for m in conversation_of(found.turns)] == ["a", "0"]


# Some numbers start with the digits of other numbers.
numbers = st.sampled_from([1, 7, 10, 71, 100, 101, 710])
keys = st.builds(RequestKey, st.integers(0, 9), numbers, numbers)


def ambiguous(names: list[str]) -> bool:
    return any(a != b and a.startswith(b) for a in names for b in names)


@given(st.lists(keys, max_size=30))
def test_request_name_is_never_a_prefix_of_another_name(requests: list[RequestKey]) -> None:
    assert not ambiguous([request.name for request in requests])


class RecordingEngine:
    """Engine that records the request ids and refuses every other request."""

    engine_id = "recording"

    def __init__(self) -> None:
        self.names: list[str] = []

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.names.append(request.request_id)
        if len(self.names) % 2:
            raise RequestRefused("recording: too long")
        one = np.array([7], np.int32)
        yield TokenChunk(one, np.zeros(1, np.float32), PolicyVersion(0, 0), "stop")


def test_evaluation_response_counts_as_wrong_when_engines_refuse_it() -> None:
    engine, task = RecordingEngine(), Fixed()
    config = RunConfig.model_validate({"eval": {"prompts": 12}})
    evaluator = Evaluator(config, task, task)  # type: ignore[arg-type]
    engines = EnginePool(lambda: [engine])  # type: ignore[list-item]
    work = evaluator.evaluate(engines, PolicyVersion(0, 0))
    (result,) = asyncio.run(work).results
    assert len(set(engine.names)) == 12 and not ambiguous(engine.names)
    assert (result.accuracy, result.responses) == (0.5, 12)
    assert (result.score_failures, result.refused) == (0, 6), (
        "a refusal counted as a failure of the scorer"
    )
    assert "6 prompts were too long for the engines" in result.message()


REWARD = '''
def whole(sample):
    """10 for each message; whether the response is the last of them."""
    last = sample.messages[-1]
    parts = {"last": float((last["role"], last["content"]) == ("assistant", sample.response))}
    return 10.0 * len(sample.messages), parts
'''


@pytest.mark.parametrize("group", [False, True])
def test_evaluation_samples_contain_the_conversation_that_was_scored(
    tmp_path: Path, group: bool
) -> None:
    write_character_tokenizer(tmp_path)
    each = "[whole(sample) for sample in samples]"
    both = f"{REWARD}\n\ndef of_all(samples):\n    return {each}\n"
    (tmp_path / "reward.py").write_text(both)
    name = f"{tmp_path / 'reward.py'}:{'of_all' if group else 'whole'}"
    config = configured(
        tmp_path,
        reward={"name": name, "group": group, "label": "whole"},
        eval={"prompts": 3, "samples": 2, "save_samples": 3, "temperature": 1.0},
    )
    model = SimulatedEngineModel(mean_length=6, step_seconds=0.001, max_sequence_tokens=600)

    async def evaluated() -> Evaluation:
        engine = SimulatedEngine("engine", model)
        engine.set_weights(PolicyVersion(0, 3))
        task = build_task(config.task, config.model.path, config.eval, has_episodes=True)
        workers = EnvironmentWorkers(config, InProcessBackend())  # type: ignore[arg-type]
        with closing(LocalScorerPool(config.scorers, config.model.path)) as pool:
            evaluator = Evaluator(config, task, pool, workers)
            return await evaluator.evaluate(EnginePool(lambda: [engine]), PolicyVersion(0, 3))

    found = asyncio.run(asyncio.wait_for(evaluated(), 120))
    samples = found.samples()
    assert len(samples) == 6
    for sample in samples:
        messages = sample["messages"]
        assert messages[0]["content"].startswith("seed ")
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert sample["response"] == messages[-1]["content"]
        answers = messages[1::2]
        own = sum(0.25 * (len(answer["content"]) % 3) for answer in answers)
        assert sample["reward"] == pytest.approx(10.0 * len(messages) + own)
        assert sample["parts"]["last"] == 1.0
        assert sample["parts"]["seen"] == len(answers), "components of turns were not added up"
        assert sample["versions"] == ["0.3"]
    assert len({len(sample["messages"]) for sample in samples}) > 1

"""Names of requests: SGLang ends every request whose name starts with the given one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from megatron_async.config import RunConfig
from megatron_async.engines.interface import GenerationRequest, RequestRefused, TokenChunk
from megatron_async.rollout.evaluate import Evaluator
from megatron_async.rollout.respond import SharedEngines
from megatron_async.trajectory.types import PolicyVersion, RequestKey
from tests.rollout.stand_ins import Fixed

numbers = st.sampled_from([1, 7, 10, 71, 100, 101, 710])  # of which some begin as others do
keys = st.builds(RequestKey, st.integers(0, 9), numbers, numbers)


def ambiguous(names: list[str]) -> bool:
    return any(a != b and a.startswith(b) for a in names for b in names)


@given(st.lists(keys, max_size=30))
def test_no_request_of_a_trajectory_is_a_prefix_of_another(requests: list[RequestKey]) -> None:
    assert not ambiguous([request.name for request in requests])


class Asked:
    """An engine that records the names, and refuses every other request."""

    engine_id = "asked"

    def __init__(self) -> None:
        self.names: list[str] = []

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.names.append(request.request_id)
        if len(self.names) % 2:
            raise RequestRefused("asked: too long")
        one = np.array([7], np.int32)
        yield TokenChunk(one, np.zeros(1, np.float32), PolicyVersion(0, 0), "stop")


def test_evaluation_names_are_no_prefixes_and_a_refusal_is_a_wrong_answer() -> None:
    engine, task = Asked(), Fixed()
    config = RunConfig.model_validate({"eval": {"prompts": 12}})
    evaluator = Evaluator(config, task, task)  # type: ignore[arg-type]
    engines = SharedEngines(lambda: [engine])  # type: ignore[list-item]
    work = evaluator.evaluate(engines, PolicyVersion(0, 0))
    (result,) = asyncio.run(work).results
    assert len(set(engine.names)) == 12 and not ambiguous(engine.names)
    assert (result.accuracy, result.answers) == (0.5, 12)
    assert (result.failed_judgements, result.refused) == (0, 6), "no scorer has failed"
    assert "6 prompts were too long for the engines" in result.sentence()

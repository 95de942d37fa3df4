"""The door: what cannot be is found, whatever comes before and after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_async.engines.door import Door, count_of, load_of
from megatron_async.engines.interface import EngineStatus, GenerationRequest, TokenChunk
from megatron_async.engines.sglang.stream import BadReport, StreamDecoder
from megatron_async.trajectory.types import PolicyVersion
from tests.engine import make_request

VOCABULARY, STOP = 50, 2
ASKED: GenerationRequest = replace(
    make_request("a", [5, 6, 7], 6, forced=False), stop_token_ids=(STOP, 3)
)


def chunk(*token_ids: int, end: Any = None, number: int = 1, logprob: float = -1.0) -> TokenChunk:
    count = len(token_ids)
    return TokenChunk(
        np.array(token_ids, np.int32),
        np.full(count, logprob, np.float32),
        PolicyVersion(0, number),
        end,
    )


GOOD = {
    "a stop token at its end": [chunk(9, 8), chunk(STOP, end="stop")],
    "the other stop token, its end in a chunk of its own": [chunk(9, 3), chunk(end="stop")],
    "as many tokens as were asked for": [chunk(9, 8, 7), chunk(6, 5, 4, end="length")],
    "an abort anywhere": [chunk(9), chunk(end="abort")],
    "an abort before the first token": [chunk(end="abort")],
    "a newer version on the way": [chunk(9), chunk(8, number=2), chunk(STOP, end="stop", number=2)],
    "the first and the last token of the vocabulary": [chunk(0, 49), chunk(end="abort")],
    "a certain token, and rounding": [chunk(9, logprob=0.0), chunk(9, logprob=1e-6)],
    "the least likely token of float32": [chunk(9, logprob=-103.3)],
}
BAD = {
    "token 50 is outside the vocabulary of 50 tokens": [chunk(9, 50)],
    "token -1 is outside the vocabulary of 50 tokens": [chunk(-1)],
    "has log-prob 5": [chunk(9, logprob=5.0)],
    "has log-prob nan": [chunk(9, logprob=float("nan"))],
    "has log-prob -inf": [chunk(9, logprob=float("-inf"))],
    "has log-prob -105": [chunk(9, logprob=-105.0)],
    "columns have the shapes": [replace(chunk(9, 8), columns=(np.zeros(1, [("routes", "<i2")]),))],
    "7 tokens came where 6 were asked for": [chunk(9, 8, 7, 6), chunk(5, 4, 9)],
    "tokens of version 0.1 came after those of 0.2": [chunk(9, number=2), chunk(8)],
    "came after the stop token 2": [chunk(9, STOP, 8)],
    "came after the stop token 3": [chunk(9, 3), chunk(8)],
    "ended with `stop` at token 9": [chunk(8, 9, end="stop")],
    "ended with `stop` at token None": [chunk(end="stop")],
    "ended with `length` after 2 of 6 tokens": [chunk(8, 9, end="length")],
}


@pytest.mark.parametrize("stream", GOOD)
def test_what_an_engine_may_send_passes(stream: str) -> None:
    door = Door(ASKED, VOCABULARY)
    assert [door.finding(one) for one in GOOD[stream]] == [None] * len(GOOD[stream])


@pytest.mark.parametrize("found", BAD)
def test_what_cannot_be_is_found_at_its_chunk(found: str) -> None:
    door = Door(ASKED, VOCABULARY)
    *before, last = BAD[found]
    assert [door.finding(one) for one in before] == [None] * len(before)
    assert found in str(door.finding(last))


def test_a_forced_length_has_no_stop_tokens() -> None:
    forced = replace(ASKED, ignore_eos=True)
    assert Door(forced).finding(chunk(9, STOP, 8, 7, 6, STOP, end="length")) is None
    assert "no stop token" in str(Door(forced).finding(chunk(9, STOP, end="stop")))


def test_a_context_that_is_full_ends_a_response_early() -> None:
    early = chunk(8, 9, end="length")
    assert Door(ASKED, longest=5).finding(early) is None
    assert Door(ASKED, longest=6).finding(early) is not None


def report(**changes: Any) -> dict[str, Any]:
    """The first report of a request: three tokens."""
    meta = {
        "completion_tokens": 3,
        "output_token_logprobs": [[-1.0, 4, None], [-2.0, 5, None], [-3.0, 6, None]],
        "weight_versions": [{"version": "0.1", "start": 0, "end": 3}],
        "finish_reason": None,
    }
    return {"output_ids": changes.pop("output_ids", [4, 5, 6]), "meta_info": {**meta, **changes}}


@pytest.mark.parametrize(
    "changes",
    [
        {"output_ids": [4, 5.0, 6]},
        {"output_ids": [4, "5", 6]},
        {"output_ids": [4, None, 6]},
        {"output_ids": [4, 7, 6]},
        {"output_ids": [4, 5, 6, 7]},
        {"output_token_logprobs": [[-1.0, 4], [None, 5], [-3.0, 6]]},
        {"output_token_logprobs": [[-1.0, 4], ["-2", 5], [-3.0, 6]]},
        {"output_token_logprobs": [[-1.0, 4], [True, 5], [-3.0, 6]]},
        {"output_token_logprobs": [[-1.0, 4], [-2.0, 6], [-3.0, 6]]},
        {"output_token_logprobs": [[-1.0, 4], [-2.0], [-3.0, 6]]},
        {"completion_tokens": 2},
        {"completion_tokens": 4},
        {"completion_tokens": 2.5},
        {"completion_tokens": True},
        {"queue_time": "long"},
        {"weight_versions": [{"version": "0.1", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "newest", "start": 0, "end": 3}]},
    ],
    ids=str,
)
def test_a_report_of_another_form_is_refused(changes: dict[str, Any]) -> None:
    assert len(StreamDecoder().feed(report())[0].token_ids) == 3
    with pytest.raises(BadReport):
        StreamDecoder().feed(report(**changes))


LOAD = {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5}


def test_the_load_of_all_parts_is_one_report() -> None:
    other = {**LOAD, "token_usage": 0.25, "num_running_reqs": 4.0}
    assert load_of([LOAD, other], 7.0) == EngineStatus(7, 2, 0.5, 7)


@pytest.mark.parametrize("name", LOAD)
@pytest.mark.parametrize("value", [None, "y", -1, True, 1e39, float("nan"), [], {}])
def test_a_load_that_cannot_be_is_no_report(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        load_of([{**LOAD, name: value}], 0.0)


def test_no_load_and_half_a_request_are_no_report() -> None:
    with pytest.raises(ValueError, match="no part"):
        load_of([], 0.0)
    with pytest.raises(ValueError, match="no whole number"):
        count_of(0.5)

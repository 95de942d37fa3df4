"""Tests the validation of an engine's replies: every invalid value is found, also between valid
data."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.engines.interface import EngineStatus, GenerationRequest, TokenChunk
from megatron_async.engines.sglang.stream import BadReport, StreamDecoder
from megatron_async.engines.stream_validation import (
    MAX_USAGE,
    StreamValidator,
    count_of,
    load_of,
)
from megatron_async.trajectory.token_checks import MAX_LOGPROB, SMALLEST_LOGPROB
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import MAX_BYTES, json_object
from tests.engine import make_request

VOCABULARY, STOP = 50, 2
REQUEST: GenerationRequest = replace(
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
    "a stop token at the end": [chunk(9, 8), chunk(STOP, end="stop")],
    "the other stop token, with the end in a separate chunk": [chunk(9, 3), chunk(end="stop")],
    "as many tokens as were requested": [chunk(9, 8, 7), chunk(6, 5, 4, end="length")],
    "an abort anywhere": [chunk(9), chunk(end="abort")],
    "an abort before the first token": [chunk(end="abort")],
    "a newer version during the response": [
        chunk(9),
        chunk(8, number=2),
        chunk(STOP, end="stop", number=2),
    ],
    "the first and the last token of the vocabulary": [chunk(0, 49), chunk(end="abort")],
    "a certain token, and rounding": [chunk(9, logprob=0.0), chunk(9, logprob=1e-6)],
    "the least likely token of float32": [chunk(9, logprob=-103.3)],
}
# For each row of the table in docs/failures.md (named by its first column): a part of the reported
# violation, and the chunks of a stream that has the violation.
BAD: dict[str, dict[str, list[TokenChunk]]] = {
    "token": {
        "token 50 is outside the vocabulary of 50 tokens": [chunk(9, 50)],
        "token -1 is outside the vocabulary of 50 tokens": [chunk(-1)],
    },
    "log-prob": {
        "has log-prob 5": [chunk(9, logprob=5.0)],
        "has log-prob 0.0011": [chunk(9, logprob=0.0011)],
        "has log-prob nan": [chunk(9, logprob=float("nan"))],
        "has log-prob -inf": [chunk(9, logprob=float("-inf"))],
        "has log-prob -104.1": [chunk(9, logprob=-104.1)],
    },
    "number of tokens": {
        "7 tokens arrived, but 6 were requested": [chunk(9, 8, 7, 6), chunk(5, 4, 9)],
        "columns have the shapes": [
            replace(chunk(9, 8), columns=(np.zeros(1, [("routes", "<i2")]),))
        ],
    },
    "policy versions": {
        "tokens of version 0.1 arrived after tokens of version 0.2": [chunk(9, number=2), chunk(8)],
    },
    "end `stop`": {
        "arrived after the stop token 2": [chunk(9, STOP, 8)],
        "arrived after the stop token 3": [chunk(9, 3), chunk(8)],
        "ended with `stop` at token 9": [chunk(8, 9, end="stop")],
        "ended with `stop` at token None": [chunk(end="stop")],
    },
    "end `length`": {
        "ended with `length` after 2 of 6 tokens": [chunk(8, 9, end="length")],
    },
    "data after the end": {
        "continued after its end": [chunk(9, end="abort"), chunk(end="abort")],
    },
}


@pytest.mark.parametrize("stream", GOOD)
def test_stream_validator_accepts_valid_streams(stream: str) -> None:
    validator = StreamValidator(REQUEST, VOCABULARY)
    assert [validator.violation(one) for one in GOOD[stream]] == [None] * len(GOOD[stream])


@pytest.mark.parametrize(
    ("row", "violation"), [(row, violation) for row in BAD for violation in BAD[row]]
)
def test_stream_validator_finds_each_violation_at_its_chunk(row: str, violation: str) -> None:
    validator = StreamValidator(REQUEST, VOCABULARY)
    *before, last = BAD[row][violation]
    assert [validator.violation(one) for one in before] == [None] * len(before)
    assert violation in str(validator.violation(last))


def test_stream_validator_ignores_stop_tokens_when_the_length_is_forced() -> None:
    forced = replace(REQUEST, ignore_eos=True)
    assert StreamValidator(forced).violation(chunk(9, STOP, 8, 7, 6, STOP, end="length")) is None
    assert "not a stop token" in str(StreamValidator(forced).violation(chunk(9, STOP, end="stop")))


def test_stream_validator_accepts_an_early_end_when_the_context_is_full() -> None:
    early = chunk(8, 9, end="length")
    assert StreamValidator(REQUEST, longest=5).violation(early) is None
    assert StreamValidator(REQUEST, longest=6).violation(early) is not None


def report(**changes: Any) -> dict[str, Any]:
    """Return the first report of a request, with three tokens, after these changes."""
    meta = {
        "id": "w",
        "prompt_tokens": len(REQUEST.input_ids),
        "completion_tokens": 3,
        "output_token_logprobs": [[-1.0, 4, None], [-2.0, 5, None], [-3.0, 6, None]],
        "weight_versions": [{"version": "0.1", "start": 0, "end": 3}],
        "finish_reason": None,
    }
    return {"output_ids": changes.pop("output_ids", [4, 5, 6]), "meta_info": {**meta, **changes}}


def span(start: Any, end: Any, version: Any = "0.1") -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


# Checks of replies to calls, which tests/rollout/test_closed_client.py tests.
CHECKS_OF_CALLS = {"size of a reply", "checksum", "data type of the weights"}
MALFORMED: dict[str, list[dict[str, Any]]] = {
    "token report": [{"id": "w2"}, {"id": None}, {"prompt_tokens": 9}, {"prompt_tokens": None}],
    "token": [
        {"output_ids": [4, 5.0, 6]},
        {"output_ids": [4, "5", 6]},
        {"output_ids": [4, None, 6]},
        {"output_ids": [4, 7, 6]},
        {"output_token_logprobs": [[-1.0, 4], [-2.0, 6], [-3.0, 6]]},
        {"output_token_logprobs": [[-1.0, 4], [-2.0], [-3.0, 6]]},
    ],
    "log-prob": [
        {"output_token_logprobs": [[-1.0, 4], [None, 5], [-3.0, 6]]},
        {"output_token_logprobs": [[-1.0, 4], ["-2", 5], [-3.0, 6]]},
        {"output_token_logprobs": [[-1.0, 4], [True, 5], [-3.0, 6]]},
    ],
    "number of tokens": [
        {"output_ids": [4, 5, 6, 7]},
        {"completion_tokens": 2},
        {"completion_tokens": 4},
        {"completion_tokens": 2.5},
        {"completion_tokens": True},
    ],
    "policy versions": [
        {"weight_versions": [{"version": "0.1", "start": 0, "end": 2}]},
        {"weight_versions": [span(2, 3), span(0, 2)]},
        {"weight_versions": [span(0, 2), span(0, 1)]},
        {"weight_versions": [span(0, 2), span(2, 2.5), span(2, 3)]},
        {"weight_versions": [span("0", 3)]},
        {"weight_versions": [span(0, 3, "newest")]},
        {"weight_versions": [span(0, 3, "0.99999999999999999999")]},
        {"weight_versions": [span(0, 3, "1_0.1")]},
        {"weight_versions": [span(0, 3, " 0.1")]},
        {"weight_versions": [span(0, 3, 0.1)]},
    ],
    "time in the queue": [{"queue_time": "long"}],
}


@pytest.mark.parametrize("changes", [c for cases in MALFORMED.values() for c in cases], ids=str)
def test_stream_decoder_refuses_malformed_reports(changes: dict[str, Any]) -> None:
    assert len(StreamDecoder(REQUEST, "w").feed(report())[0].token_ids) == 3
    with pytest.raises(BadReport):
        StreamDecoder(REQUEST, "w").feed(report(**changes))


def test_stream_decoder_shortens_an_engines_error_message() -> None:
    for malformed in (
        {"error": {"code": 400, "message": "no\n" * 10**6}},
        {"error": "no\n" * 10**6},
        report(finish_reason={"type": "abort", "status_code": 500, "message": "no\n" * 10**6}),
        report(weight_versions=[span(0, 3, "9" * 10**6)]),
        report(output_ids=["9" * 10**6, 5, 6]),
    ):
        with pytest.raises(BadReport) as raised:
            StreamDecoder(REQUEST, "w").feed(malformed)
        assert len(str(raised.value)) <= 500 and "\n" not in str(raised.value)


@pytest.mark.parametrize("answer", [b"[" * 10**5, b'{"a":' * 10**5, b"\xff\xfe", b"3", b"", b"y"])
def test_json_object_returns_an_empty_object_when_the_reply_has_none(answer: bytes) -> None:
    assert json_object(answer) == {}


LOAD = {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5}


def test_load_of_combines_the_reports_of_all_data_parallel_parts() -> None:
    other = {**LOAD, "token_usage": 0.25, "num_running_reqs": 4.0}
    assert load_of([LOAD, other], 7.0) == EngineStatus(7, 2, 0.5, 7)


@pytest.mark.parametrize("name", LOAD)
@pytest.mark.parametrize("value", [None, "y", "3", -1, True, 1e39, float("nan"), [], {}])
def test_load_of_raises_when_a_value_is_invalid(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        load_of([{**LOAD, name: value}], 0.0)


def test_load_checks_raise_when_report_is_empty_or_count_is_fractional() -> None:
    with pytest.raises(ValueError, match="load report is empty"):
        load_of([], 0.0)
    with pytest.raises(ValueError, match="not a whole number"):
        count_of(0.5)


def documented() -> dict[str, str]:
    """Return the rows of the table in docs/failures.md that lists valid replies, by their first
    column."""
    page = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    section = page.partition("## Checks of an engine's replies")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return dict(rows[1:])


def test_documented_reply_checks_match_the_implemented_checks() -> None:
    """Every row of the table has a refusal in this file, every refusal has a row, and their bounds
    are equal."""
    table = documented()
    assert table.keys() == BAD.keys() | MALFORMED.keys() | CHECKS_OF_CALLS | {"load report"}
    for row, bounds in {
        "log-prob": (SMALLEST_LOGPROB, MAX_LOGPROB),
        "load report": (MAX_USAGE,),
        "size of a reply": (MAX_BYTES >> 20,),
    }.items():
        numbers = re.findall(r"-?\d[\d,.]*\d|\d", table[row])
        assert {f"{bound:,g}" for bound in bounds} <= set(numbers), row

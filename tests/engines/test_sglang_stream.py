"""Tests that reports of a streamed request become chunks: each token arrives once, with its
version."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import TokenChunk
from megatron_async.engines.sglang.client import _counter
from megatron_async.engines.sglang.stream import (
    BadReport,
    Refusal,
    StreamDecoder,
    events_of,
    most_bytes,
    refusal_of,
    sampling_params,
)
from megatron_async.trajectory.types import PolicyVersion
from tests.engine import make_request

REQUEST = make_request("w", [1, 2], 100)


def new_decoder() -> StreamDecoder:
    return StreamDecoder(REQUEST, "w")


def _report(
    tokens: list[int], total: int, spans: Any, finish: dict[str, Any] | None = None
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": "w",
        "prompt_tokens": 2,
        "finish_reason": finish,
        "completion_tokens": total,
        "output_token_logprobs": [[-float(token), token, None] for token in tokens],
        "weight_version": "0.9",
    }
    if spans is not None:
        meta["weight_versions"] = [
            {"version": version, "start": start, "end": end} for version, start, end in spans
        ]
    return {"output_ids": tokens, "meta_info": meta}


def _flat(chunks: list[TokenChunk]) -> list[tuple[int, float, PolicyVersion]]:
    return [
        (int(token), float(logprob), chunk.version)
        for chunk in chunks
        for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]


@given(st.data())
def test_stream_decoder_gives_same_tokens_and_versions_for_any_report_sizes(
    data: st.DataObject,
) -> None:
    length = data.draw(st.integers(1, 60))
    borders = (
        sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
    )
    edges = [0, *borders, length]
    spans = [(f"1.{i}", a, b) for i, (a, b) in enumerate(pairwise(edges))]
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=6)) | {length})
    decoder, chunks, start = new_decoder(), [], 0
    for cut in cuts:
        visible = [(v, a, min(b, cut)) for v, a, b in spans if a < cut]
        finish = {"type": "length"} if cut == length else None
        chunks += decoder.feed(_report(list(range(start, cut)), cut, visible, finish))
        start = cut
    expected = [
        (t, -float(t), PolicyVersion(1, i))
        for i, (_, a, b) in enumerate(spans)
        for t in range(a, b)
    ]
    assert _flat(chunks) == expected
    assert [chunk.end for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_stream_decoder_ignores_token_repeated_by_abort_in_the_queue() -> None:
    decoder = new_decoder()
    first = decoder.feed(_report([4, 5], 2, [("0.1", 0, 2)]))
    last = decoder.feed(_report([5], 2, [("0.1", 0, 2)], {"type": "abort"}))
    assert [token for token, _, _ in _flat(first + last)] == [4, 5]
    assert len(last) == 1 and last[0].end == "abort" and len(last[0].token_ids) == 0


def test_report_is_refused_when_its_tokens_have_no_version() -> None:
    with pytest.raises(BadReport):
        new_decoder().feed(_report([4, 5], 2, None))


def test_request_ends_when_it_was_aborted_before_it_had_a_version() -> None:
    [chunk] = new_decoder().feed(_report([], 0, None, {"type": "abort"}))
    assert (len(chunk.token_ids), chunk.end, str(chunk.version)) == (0, "abort", "0.9")


def _aborted(status: int) -> dict[str, Any]:
    end = {"type": "abort", "status_code": status, "message": "no"}
    return _report([], 0, [("0.1", 0, 0)], end)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        (_report([1, 2], 2, [("0.1", 0, 1)]), "do not cover"),
        (_report([], 0, [("0.1", 0, 0)], {"type": "explosion"}), "unknown reason"),
        (
            _report([], 0, [("0.1", 0, 0)], {"type": "abort", "status_code": 400, "message": "no"}),
            "rejected it with status 400: no",
        ),
    ],
)
def test_stream_decoder_raises_when_a_report_is_inconsistent(
    report: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadReport, match=message):
        new_decoder().feed(report)


def test_report_may_lack_prompt_tokens_when_aborted_in_the_queue() -> None:
    report = _report([], 0, [("0.1", 0, 0)], {"type": "abort"})
    del report["meta_info"]["prompt_tokens"]
    assert new_decoder().feed(report)[-1].end == "abort"


def test_report_is_refused_when_it_exceeds_the_largest_size() -> None:
    decoder, piece, size = new_decoder(), b"x" * (1 << 16), 0
    with pytest.raises(BadReport, match="bytes arrived without the end of a report"):
        while size < 1 << 30:
            size += len(piece)
            [*decoder.chunks(piece)]
    assert size <= most_bytes(REQUEST) + len(piece)


@pytest.mark.parametrize(
    "garbage",
    [
        [],
        {},
        {"meta_info": None},
        {"meta_info": {"completion_tokens": 1}, "output_ids": {"a": 1}},
        {"meta_info": {"completion_tokens": 0, "finish_reason": "stop"}},
        _report([1 << 40], 1, [("0.0", 0, 1)]),
        _report([5], 1, [("0.0", 0, None)]),
    ],
)
def test_stream_decoder_raises_value_error_when_data_is_not_a_report(garbage: Any) -> None:
    """An error of another kind would end the run instead of the request."""
    with pytest.raises(ValueError):
        new_decoder().feed(garbage)


@pytest.mark.parametrize(
    ("report", "refused"),
    [
        ({"error": {"message": "no", "code": 400, "retryable": False}}, True),
        ({"error": {"message": "no", "code": 400}}, True),
        ({"error": {"message": "later", "code": 400, "retryable": True}}, False),
        ({"error": {"message": "defect", "code": 500, "retryable": False}}, False),
        ({"error": {"message": "another format"}}, False),
        (_aborted(400), True),
        (_aborted(422), True),
        (_aborted(503), False),
        (_aborted(500), False),
    ],
)
def test_stream_decoder_raises_refusal_only_when_the_request_is_invalid(
    report: dict[str, Any], refused: bool
) -> None:
    with pytest.raises(BadReport) as raised:
        new_decoder().feed(report)
    assert isinstance(raised.value, Refusal) is refused


@pytest.mark.parametrize(
    ("status", "refused"),
    [(400, True), (413, True), (422, True), (401, False), (404, False), (429, False), (500, False)],
)
def test_refusal_of_blames_request_or_engine_by_http_status(status: int, refused: bool) -> None:
    assert isinstance(refusal_of(status, "why"), Refusal) is refused


@given(st.lists(st.binary(min_size=1, max_size=30).filter(lambda b: b"\n" not in b)), st.data())
def test_events_of_returns_all_events_for_any_split_of_the_bytes(
    payloads: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=5)))
    edges = [0, *cuts, len(stream)]
    buffer, events = bytearray(), []
    for start, stop in pairwise(edges):
        events += events_of(buffer, stream[start:stop])
    assert events == payloads and not buffer


def test_sampling_params_have_no_stop_tokens_when_the_length_is_forced() -> None:
    forced = sampling_params(make_request("r", [1], 7, stop_token_ids=(2,)))
    assert forced["ignore_eos"] and forced["max_new_tokens"] == 7
    assert "stop_token_ids" not in forced
    free = sampling_params(
        make_request(
            "r", [1], 7, forced=False, stop_token_ids=(2,), sampling=SamplingConfig(temperature=0.5)
        )
    )
    assert free["stop_token_ids"] == [2] and free["temperature"] == 0.5


def test_counter_is_summed_over_labels_and_zero_when_missing() -> None:
    metrics = b'# HELP x\nx_total{rank="0"} 2.0\nx_total{rank="1"} 3.0\ny_total 9.0\n'
    assert _counter(metrics, b"x_total") == 5
    assert _counter(metrics, b"z_total") == 0

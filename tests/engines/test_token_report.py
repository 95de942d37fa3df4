"""Tests `Outbox` and `TokenReport`: the tokens of many streams are returned in order, and each
stream has less than a chunk unacknowledged when tokens are added."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.engines.interface import EngineError, RequestRefused, StreamEnd, TokenChunk
from megatron_async.engines.token_report import Item, Outbox, TokenReport
from megatron_async.errors import ComponentFailure, ProcessKilled
from megatron_async.trajectory.types import PolicyVersion


def chunk(first: int, count: int, number: int = 0, end: StreamEnd | None = None) -> TokenChunk:
    tokens = np.arange(first, first + count, dtype=np.int32)
    return TokenChunk(tokens, -tokens.astype(np.float32) / 7, PolicyVersion(3, number), end)


def comparable(items: list[tuple[int, Item]]) -> list[object]:
    """Return the items as plain values that can be compared."""
    return [
        (s, i.token_ids.tolist(), i.logprobs.tolist(), tuple(i.version), i.end, i.queued_seconds)
        if isinstance(i, TokenChunk)
        else (s, type(i), str(i))
        for s, i in items
    ]


def test_token_report_returns_spans_ends_and_failures_of_many_streams() -> None:
    items: list[tuple[int, Item]] = [
        (1 << 40, chunk(5, 3)),
        (2, EngineError("engine1: the stream broke off")),
        (4, replace(chunk(2, 1), queued_seconds=0.123456)),
        (7, chunk(9, 2, number=4, end="stop")),
        (8, RequestRefused("too long")),
        (9, chunk(0, 0, end="abort")),
        (10, ComponentFailure("no more files")),
    ]
    report = pickle.loads(pickle.dumps(TokenReport.of(items)))
    assert comparable(list(report.items())) == comparable(items)


@pytest.mark.parametrize("order", permutations(range(3)))
def test_token_report_contains_streams_with_different_columns(order: tuple[int, ...]) -> None:
    routes = np.zeros(2, [("routes", "<i2", (2, 4))])
    routes["routes"][1] = 7
    mask = np.ones(2, [("mask", "?")])
    chunks = [replace(chunk(9 * i, 2), columns=c) for i, c in enumerate([(routes,), (mask,), ()])]
    items: list[tuple[int, Item]] = [(stream, chunks[stream]) for stream in order]
    items += [(5, chunks[2]), (5, chunks[0]), (5, chunk(0, 0, end="abort"))]
    found = list(pickle.loads(pickle.dumps(TokenReport.of(items))).items())
    last = replace(chunks[0], end="abort")
    expected = [*items[:-2], (5, last)]
    assert comparable(found) == comparable(expected)
    for (_, actual), (_, wanted) in zip(found, expected, strict=True):
        assert [c.tobytes() for c in actual.columns] == [c.tobytes() for c in wanted.columns]


def test_token_report_turns_unknown_failure_into_its_base_class() -> None:
    [(_, failure)] = TokenReport.of([(0, ProcessKilled("gone"))]).items()
    assert type(failure) is ComponentFailure and str(failure) == "gone"


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 90), st.sampled_from([0, 0, 0, 1])), max_size=40
    ),
    st.integers(1, 7),
)
def test_outbox_returns_tokens_once_in_order_in_a_span_per_version(
    puts: list[tuple[int, int, int]], most: int
) -> None:
    outbox, expected = Outbox(64), dict[int, list[tuple[int, int]]]()
    for index, (stream, count, number) in enumerate(puts):
        outbox.put(stream, chunk(100 * index, count, number))
        tokens = [(100 * index + i, number) for i in range(count)]
        expected.setdefault(stream, []).extend(tokens)
    found = dict[int, list[tuple[int, int]]]()
    while len(outbox):
        spans = [(s, i) for s, i in outbox.take(most).items() if isinstance(i, TokenChunk)]
        assert len({stream for stream, _ in spans}) <= most
        for (stream, before), (other, after) in pairwise(spans):
            assert stream != other or before.version != after.version
        for stream, span in spans:
            assert (span.logprobs == -span.token_ids.astype(np.float32) / 7).all()
            tokens = [(int(token), span.version.number) for token in span.token_ids]
            found.setdefault(stream, []).extend(tokens)
    assert found == expected


def test_outbox_span_has_queue_time_of_first_chunk_and_end_of_last_chunk() -> None:
    outbox = Outbox(64)
    for item in (replace(chunk(5, 3), queued_seconds=0.5), chunk(8, 2), chunk(0, 0, end="abort")):
        outbox.put(1, item)
    outbox.put(2, chunk(9, 1))
    assert comparable(list(outbox.take(9).items())) == comparable(
        [(1, replace(chunk(5, 5, end="abort"), queued_seconds=0.5)), (2, chunk(9, 1))]
    )


def test_outbox_accepts_more_for_an_unbound_stream_until_the_stream_ends() -> None:
    outbox = Outbox(64)
    outbox.unbind(0)
    for index in range(9):
        assert outbox.accepts_more(0)
        outbox.put(0, chunk(100 * index, 64))
    outbox.take(9)
    assert outbox.accepts_more(0) and outbox.unacknowledged
    outbox.put(0, chunk(0, 0, end="abort"))
    outbox.take(9)
    outbox.put(0, chunk(0, 64))
    assert not outbox.accepts_more(0)


def test_outbox_accepts_more_for_a_stream_until_a_chunk_is_unacknowledged() -> None:
    outbox = Outbox(64)
    outbox.put(0, chunk(0, 63))
    assert outbox.accepts_more(0) and outbox.accepts_more(1) and not outbox.unacknowledged
    outbox.take(9)
    assert outbox.accepts_more(0) and outbox.unacknowledged
    outbox.put(0, chunk(63, 1))
    assert not outbox.accepts_more(0) and outbox.accepts_more(1)
    outbox.acknowledge([0])  # This acknowledges the 63 reported tokens; one token still waits.
    assert outbox.accepts_more(0) and not outbox.unacknowledged
    outbox.put(0, chunk(64, 63))
    assert not outbox.accepts_more(0)
    outbox.take(9)
    assert not outbox.accepts_more(0)
    outbox.acknowledge([0])
    assert outbox.accepts_more(0)


def test_outbox_expects_no_acknowledgment_of_ended_or_forgotten_streams() -> None:
    outbox = Outbox(64)
    outbox.put(0, chunk(0, 64, end="length"))
    outbox.put(1, chunk(0, 64))
    outbox.put(2, chunk(0, 64))
    outbox.put(2, EngineError("it broke off"))
    outbox.forget(1)
    assert [stream for stream, _ in outbox.take(9).items()] == [0, 2, 2]
    assert not outbox.unacknowledged

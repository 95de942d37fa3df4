"""Columns of many streams: what goes in comes out, in order, and no more than a chunk is open."""

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


def plain(items: list[tuple[int, Item]]) -> list[object]:
    """Comparable values."""
    return [
        (s, i.token_ids.tolist(), i.logprobs.tolist(), tuple(i.version), i.end, i.queued_seconds)
        if isinstance(i, TokenChunk)
        else (s, type(i), str(i))
        for s, i in items
    ]


def test_a_report_holds_runs_ends_and_failures_of_many_streams() -> None:
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
    assert plain(list(report.items())) == plain(items)


@pytest.mark.parametrize("order", permutations(range(3)))
def test_streams_with_other_columns_are_in_one_report(order: tuple[int, ...]) -> None:
    routes = np.zeros(2, [("routes", "<i2", (2, 4))])
    routes["routes"][1] = 7
    mask = np.ones(2, [("mask", "?")])
    chunks = [replace(chunk(9 * i, 2), columns=c) for i, c in enumerate([(routes,), (mask,), ()])]
    items: list[tuple[int, Item]] = [(stream, chunks[stream]) for stream in order]
    items += [(5, chunks[2]), (5, chunks[0]), (5, chunk(0, 0, end="abort"))]
    found = list(pickle.loads(pickle.dumps(TokenReport.of(items))).items())
    last = replace(chunks[0], end="abort")
    wanted = [*items[:-2], (5, last)]
    assert plain(found) == plain(wanted)
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert [c.tobytes() for c in one.columns] == [c.tobytes() for c in other.columns]


def test_a_failure_of_another_kind_comes_as_its_nearest() -> None:
    [(_, failure)] = TokenReport.of([(0, ProcessKilled("gone"))]).items()
    assert type(failure) is ComponentFailure and str(failure) == "gone"


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 90), st.sampled_from([0, 0, 0, 1])), max_size=40
    ),
    st.integers(1, 7),
)
def test_what_is_put_in_comes_out_once_and_in_order_a_run_for_each_version(
    puts: list[tuple[int, int, int]], most: int
) -> None:
    outbox, wanted = Outbox(64), dict[int, list[tuple[int, int]]]()
    for place, (stream, count, number) in enumerate(puts):
        outbox.put(stream, chunk(100 * place, count, number))
        tokens = [(100 * place + i, number) for i in range(count)]
        wanted.setdefault(stream, []).extend(tokens)
    found = dict[int, list[tuple[int, int]]]()
    while len(outbox):
        runs = [(s, i) for s, i in outbox.take(most).items() if isinstance(i, TokenChunk)]
        assert len({stream for stream, _ in runs}) <= most
        for (stream, before), (other, after) in pairwise(runs):
            assert stream != other or before.version != after.version
        for stream, run in runs:
            assert (run.logprobs == -run.token_ids.astype(np.float32) / 7).all()
            tokens = [(int(token), run.version.number) for token in run.token_ids]
            found.setdefault(stream, []).extend(tokens)
    assert found == wanted


def test_a_run_has_the_wait_of_its_first_chunk_and_the_end_of_its_last() -> None:
    outbox = Outbox(64)
    for item in (replace(chunk(5, 3), queued_seconds=0.5), chunk(8, 2), chunk(0, 0, end="abort")):
        outbox.put(1, item)
    outbox.put(2, chunk(9, 1))
    assert plain(list(outbox.take(9).items())) == plain(
        [(1, replace(chunk(5, 5, end="abort"), queued_seconds=0.5)), (2, chunk(9, 1))]
    )


def test_a_stream_without_a_bound_has_room_until_it_has_ended() -> None:
    outbox = Outbox(64)
    outbox.unbind(0)
    for place in range(9):
        assert outbox.has_room(0)
        outbox.put(0, chunk(100 * place, 64))
    outbox.take(9)
    assert outbox.has_room(0) and outbox.unacknowledged
    outbox.put(0, chunk(0, 0, end="abort"))
    outbox.take(9)
    outbox.put(0, chunk(0, 64))
    assert not outbox.has_room(0)


def test_a_stream_has_room_until_a_chunk_of_it_is_unacknowledged() -> None:
    outbox = Outbox(64)
    outbox.put(0, chunk(0, 63))
    assert outbox.has_room(0) and outbox.has_room(1) and not outbox.unacknowledged
    outbox.take(9)
    assert outbox.has_room(0) and outbox.unacknowledged
    outbox.put(0, chunk(63, 1))
    assert not outbox.has_room(0) and outbox.has_room(1)
    outbox.acknowledge([0])  # of what was reported: one token still waits
    assert outbox.has_room(0) and not outbox.unacknowledged
    outbox.put(0, chunk(64, 63))
    assert not outbox.has_room(0)
    outbox.take(9)
    assert not outbox.has_room(0)
    outbox.acknowledge([0])
    assert outbox.has_room(0)


def test_a_stream_that_has_ended_or_is_forgotten_waits_for_no_acknowledgement() -> None:
    outbox = Outbox(64)
    outbox.put(0, chunk(0, 64, end="length"))
    outbox.put(1, chunk(0, 64))
    outbox.put(2, chunk(0, 64))
    outbox.put(2, EngineError("it broke off"))
    outbox.forget(1)
    assert [stream for stream, _ in outbox.take(9).items()] == [0, 2, 2]
    assert not outbox.unacknowledged

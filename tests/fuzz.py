"""Provides property tests of damaged input: the number of their examples, and the check of
refusals.

CI runs few examples of each property at a fixed seed. To run 200 times as many at new seeds, call
`MEGATRON_ASYNC_FUZZ=200 pytest -k fuzz`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_async.errors import UserError

FACTOR = int(os.environ.get("MEGATRON_ASYNC_FUZZ", "0"))
LONGEST_MESSAGE = 1500

T = TypeVar("T")


def fuzzed(examples: int) -> settings:
    """Return Hypothesis settings for a property that runs `examples` examples in CI."""
    return settings(
        max_examples=examples * max(1, FACTOR),
        derandomize=not FACTOR,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=bool(FACTOR),
    )


def accepted(call: Callable[[], T]) -> T | None:
    """Return the result of `call`, or None if `call` raises a UserError with one short printable
    message."""
    try:
        return call()
    except UserError as error:
        message = str(error)
        assert message and message.isprintable() and len(message) <= LONGEST_MESSAGE, message
        return None


def _deep(levels: int) -> str:
    return "[" * levels + "]" * levels


# Texts of JSON values, including values that `json.dumps` cannot or should not write.
_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=6)
    | st.sampled_from(["default", "linear", "llama3", "silu", "float32", "4", "-1", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["factor", "rope_type", "type", "rope_theta"]) | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
).map(json.dumps)
_EXTREME = st.sampled_from(
    [
        "9" * 30,
        "9" * 400,
        "9" * 5000,
        "-" + "9" * 5000,
        "1e999",
        "-1e999",
        "1e-999",
        "0",
        "NaN",
        "Infinity",
        '"\\ud800"',
        '"\\u2028"',
        '"\u2028"',
        '"\x85"',
        "[]",
        "{}",
        "null",
        _deep(50),
        _deep(2000),
        _deep(200_000),
        '{"a":' * 200_000,
        "",
        "}",
        "1,",
        "'x'",
    ]
)
json_texts = _PLAIN | _EXTREME


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy that generates `whole` with bytes removed, inserted or changed."""

    def cut(position: int, length: int) -> bytes:
        return whole[:position] + whole[position + length :]

    def insert(position: int, piece: bytes) -> bytes:
        return whole[:position] + piece + whole[position:]

    def change(position: int, piece: bytes) -> bytes:
        return whole[:position] + piece + whole[position + len(piece) :]

    positions = st.integers(0, len(whole)) | st.integers(0, min(64, len(whole)))
    pieces = st.binary(max_size=9) | st.sampled_from(
        [b"\xff", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n", b"\r", b"\xe2\x80\xa8"]
    )
    return st.one_of(
        st.builds(cut, positions, st.integers(0, len(whole))),
        st.builds(insert, positions, pieces),
        st.builds(change, positions, pieces),
        st.binary(max_size=40),
    )

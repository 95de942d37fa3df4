"""Tests the encoding of differences (deltas) between byte strings: applying a delta returns exactly
the encoded bytes, or raises a clear error."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.weight_sync.blocks import DeltaError, apply, encode

LENGTHS = st.integers(0, 700)
SEEDS = st.integers(0, 2**16)
BLOCKS = st.sampled_from([2, 64, 256])


def _pair(length: int, seed: int, share: float) -> tuple[bytes, bytes]:
    """Return two random byte strings that differ in about the fraction `share` of their bytes."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, length, dtype=np.uint8)
    changed = base ^ (rng.integers(1, 256, length) * (rng.random(length) < share)).astype(np.uint8)
    return base.tobytes(), changed.tobytes()


@given(LENGTHS, SEEDS, st.sampled_from([0.0, 0.01, 1.0]), BLOCKS)
def test_apply_returns_the_new_bytes(length: int, seed: int, share: float, block: int) -> None:
    base, new = _pair(length, seed, share)
    assert apply(base, encode(base, new, block)) == new


def test_apply_raises_before_allocating_when_the_delta_claims_a_huge_size() -> None:
    base, new = _pair(9, 0, 0.1)
    delta = bytearray(encode(base, new, 2))
    # The compressed frame's header now claims a content of far more bytes than the frame contains.
    delta[60] ^= 192
    with pytest.raises(DeltaError, match="bytes instead of"):
        apply(base, bytes(delta))


@given(st.integers(1, 700), SEEDS, BLOCKS, st.data())
def test_apply_raises_or_returns_the_new_bytes_when_the_delta_is_damaged(
    length: int, seed: int, block: int, data: st.DataObject
) -> None:
    base, new = _pair(length, seed, 0.1)
    delta = bytearray(encode(base, new, block))
    delta[data.draw(st.integers(0, len(delta) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(DeltaError):
        assert apply(base, bytes(delta)) == new


@given(st.integers(1, 700), SEEDS, st.data())
def test_apply_raises_when_the_delta_is_truncated(
    length: int, seed: int, data: st.DataObject
) -> None:
    base, new = _pair(length, seed, 0.1)
    delta = encode(base, new)
    with pytest.raises(DeltaError):
        apply(base, delta[: data.draw(st.integers(0, len(delta) - 1))])


@given(st.integers(1, 700), SEEDS, st.data())
def test_apply_raises_when_the_base_differs(length: int, seed: int, data: st.DataObject) -> None:
    base, new = _pair(length, seed, 0.1)
    other = bytearray(base)
    other[data.draw(st.integers(0, length - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DeltaError):
        apply(bytes(other), encode(base, new))


def test_apply_raises_when_the_base_has_another_length() -> None:
    with pytest.raises(DeltaError, match="is for 4 bytes, the base has 5"):
        apply(b"abcde", encode(b"abcd", b"abce"))


def test_encode_stores_only_changed_blocks() -> None:
    base = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    new = base.copy()
    new[4096 * 7 : 4096 * 9] ^= np.random.default_rng(1).integers(0, 256, 8192, dtype=np.uint8)
    assert len(encode(base.tobytes(), base.tobytes())) < 100
    assert 8192 < len(encode(base.tobytes(), new.tobytes())) < 8192 + 200

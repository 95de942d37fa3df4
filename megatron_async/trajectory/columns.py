"""Columns of tokens: what is known of each, declared once with name, type and inner shape.

Every token has an id and a log-prob. A further column is declared in one line, as a structured type
of one field, here or where its shape is known:

    ROUTES = np.dtype([("routes", "<i2", (2, 4))])

An engine puts an array of that type beside ids and log-probs (`TokenChunk.columns`). It brings its
declaration along: reports, the store, its export, segments and batches go by it, and hold nothing
where tokens have no such column.

Invariants
- The arrays of n tokens have the shape [n], in this order: ids, log-probs, further columns.
- A blob holds one column behind the other, each with the values of all tokens, little-endian.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
Types = tuple[np.dtype[Any], ...]

TOKEN_IDS: Final = np.dtype("<i4")
LOGPROBS: Final = np.dtype("<f4")
NO_TOKENS: Final[Arrays] = (np.zeros(0, TOKEN_IDS), np.zeros(0, LOGPROBS))


def find_mismatch(arrays: Arrays) -> str | None:
    """Return what is wrong with columns of the same tokens; None where nothing is."""
    for array in arrays:
        if array.shape != (arrays[0].size,):
            return f"columns have the shapes {[array.shape for array in arrays]}"
    return None


def joined(parts: Sequence[Arrays]) -> Arrays:
    """The tokens of several parts, which have the same columns, end to end."""
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def blob(parts: Sequence[Arrays]) -> bytes:
    """The bytes of several parts, which have the same columns."""
    return b"".join([part.tobytes() for column in zip(*parts, strict=True) for part in column])


def unpacked(blobs: Sequence[bytes], stored: str | None) -> Arrays:
    """Inverse of `blob`, for several end to end, whose further columns are `stored`."""
    found, start, size = [], 0, token_bytes(stored)
    for kind in _types(stored):
        end = start + kind.itemsize
        parts = [data[len(data) // size * start : len(data) // size * end] for data in blobs]
        found.append(np.frombuffer(bytearray().join(parts), kind))
        start = end
    return tuple(found)


def text(further: Types) -> str | None:
    """The declarations of further columns as they are stored; None for none."""
    return json.dumps([kind.descr[0] for kind in further]) if further else None


def token_bytes(stored: str | None) -> int:
    """Bytes of a token in a blob whose further columns are `stored`."""
    return sum(kind.itemsize for kind in _types(stored))


def _types(stored: str | None) -> Types:
    further = [np.dtype([tuple(field)]) for field in json.loads(stored)] if stored else ()
    return TOKEN_IDS, LOGPROBS, *further

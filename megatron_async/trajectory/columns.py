"""Provides token columns: arrays with one entry per token, declared once with name, type and shape.

Every token has an id and a log-prob. A further column is declared in one line, as a structured
dtype with one field, in this module or where the column's shape is known:

    ROUTES = np.dtype([("routes", "<i2", (2, 4))])

An engine returns an array of that dtype in addition to the ids and log-probs
(`TokenChunk.columns`). The dtype is stored with the array. All code that handles columns (messages
from engines, the store, its export file, segments and batches) reads the name, type and shape from
that dtype, so a new column needs no change there.

Invariants
- The arrays of n tokens have shape [n], in this order: ids, log-probs, further columns.
- A blob contains the columns one after the other, each with the values of all tokens,
  little-endian.
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
    """Check that all arrays have one entry per token; return what is wrong, else None."""
    for array in arrays:
        if array.shape != (arrays[0].size,):
            return f"columns have the shapes {[array.shape for array in arrays]}"
    return None


def joined(parts: Sequence[Arrays]) -> Arrays:
    """Concatenate several lists of token columns along the tokens.

    All lists must have the same columns.
    """
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def blob(parts: Sequence[Arrays]) -> bytes:
    """Serialize several lists of token columns, concatenated along the tokens, as one bytes object.

    All lists must have the same columns. `unpacked` is the inverse.
    """
    return b"".join([part.tobytes() for column in zip(*parts, strict=True) for part in column])


def unpacked(blobs: Sequence[bytes], stored: str | None) -> Arrays:
    """Read token columns from `blobs`, which `blob` wrote, and concatenate them along the tokens.

    Args:
        blobs: Blobs that all have the same columns.
        stored: Names, types and shapes of the columns besides ids and log-probs, as `text` returns
            them; None if there are no such columns.
    """
    found, start, size = [], 0, token_bytes(stored)
    for kind in _types(stored):
        end = start + kind.itemsize
        parts = [data[len(data) // size * start : len(data) // size * end] for data in blobs]
        found.append(np.frombuffer(bytearray().join(parts), kind))
        start = end
    return tuple(found)


def text(further: Types) -> str | None:
    """Return the types of the columns that tokens have besides ids and log-probs, as JSON text;
    None if there are no such columns."""
    return json.dumps([kind.descr[0] for kind in further]) if further else None


def token_bytes(stored: str | None) -> int:
    """Return the number of bytes that one token takes up in a blob.

    `stored` describes the columns besides ids and log-probs, as `text` returns them.
    """
    return sum(kind.itemsize for kind in _types(stored))


def _types(stored: str | None) -> Types:
    further = [np.dtype([tuple(field)]) for field in json.loads(stored)] if stored else ()
    return TOKEN_IDS, LOGPROBS, *further

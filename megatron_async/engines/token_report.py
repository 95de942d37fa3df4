"""Packs the tokens of many streams of an engine into a few arrays, so that one message has all of
them.

The engine's host process reads the streams and puts their items (chunks of tokens, or a failure)
into an `Outbox`. A `TokenReport` with the items is sent to the rollout manager (`relay.py`). The
module itself uses no process and no clock.

Invariants
- Every item that is put in comes out once, and the items of a stream come out in order. The items
  of a stream in a report are joined to one span for each policy version, and the stream's end to
  the last span, so that the end does not come later than tokens in the same report.
- An item of a stream is added only while fewer than `chunk_tokens` of the stream's tokens are
  unacknowledged, so that a kill of the process loses at most about one chunk of it. A stream that
  was aborted has no such limit, because the engine generates no more tokens for it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from megatron_async.engines.interface import EngineError, RequestRefused, StreamEnd, TokenChunk
from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.columns import NO_TOKENS, Arrays, Types, joined
from megatron_async.trajectory.types import PolicyVersion

Failure = EngineError | ComponentFailure
Item = TokenChunk | Failure

_ENDS: Final[tuple[StreamEnd | None, ...]] = (None, "stop", "length", "abort")
_FAILURES: Final[tuple[type[Failure], ...]] = (RequestRefused, EngineError, ComponentFailure)
_FIRST_FAILURE = len(_ENDS)


@dataclass(frozen=True, eq=False)
class TokenReport:
    """Spans of tokens of many streams, one after the other. All tokens of a span belong to one
    stream and one policy version, and have the same columns: arrays with one entry for each token,
    first ids and log-probs.

    Attributes:
        runs_R7: Seven integers for each of R spans: number of the stream, number of tokens, lineage
            and number of the policy version, end, index of the span's columns in `tokens`, and
            microseconds in the engine's queue. An end below `len(_ENDS)` is an index into `_ENDS`.
            Any other end, minus `len(_ENDS)`, is an index into `_FAILURES`; the texts of the
            failures are in `messages` in the same order.
        tokens: One entry for each set of columns with the same types: the joined columns of all
            spans that have these types.
        messages: Texts of the failures.
    """

    runs_R7: npt.NDArray[np.int64]
    tokens: tuple[Arrays, ...]
    messages: tuple[str, ...] = ()

    @classmethod
    def of(cls, items: Iterable[tuple[int, Item]]) -> "TokenReport":
        """Create a report from (stream number, item) pairs in this order. Adjacent chunks of one
        stream with the same version and columns become one span."""
        runs: list[tuple[int, int, int, int, int, int, int]] = []
        tokens: dict[Types, tuple[int, list[Arrays]]] = {}
        messages: list[str] = []
        for stream, item in items:
            if isinstance(item, TokenChunk):
                end, queued = _ENDS.index(item.end), round(1e6 * item.queued_seconds)
                count, place = len(item.token_ids), runs[-1][5] if runs else 0
                if count:
                    types = tuple([c.dtype for c in item.columns]) if item.columns else ()
                    place, parts = tokens.setdefault(types, (len(tokens), []))
                    parts.append((item.token_ids, item.logprobs, *item.columns))
                if runs and runs[-1][0] == stream and runs[-1][2:6] == (*item.version, 0, place):
                    before = runs.pop()
                    count, queued = before[1] + count, before[6]
                runs.append((stream, count, *item.version, end, place, queued))
            else:
                kind = next(i for i, known in enumerate(_FAILURES) if isinstance(item, known))
                runs.append((stream, 0, 0, 0, _FIRST_FAILURE + kind, 0, 0))
                messages.append(str(item))
        return cls(
            np.array(runs, np.int64).reshape(-1, 7),
            tuple(joined(parts) for _, parts in tokens.values()) or (NO_TOKENS,),
            tuple(messages),
        )

    def items(self) -> Iterator[tuple[int, Item]]:
        """Yield (stream number, item) pairs: each span as a chunk, and each failure."""
        starts, messages = [0] * len(self.tokens), iter(self.messages)
        # Create only one `PolicyVersion` object for all chunks with the same version.
        versions: dict[tuple[int, int], PolicyVersion] = {}
        for stream, count, lineage, number, end, place, queued in self.runs_R7.tolist():
            if end >= _FIRST_FAILURE:
                yield stream, _FAILURES[end - _FIRST_FAILURE](next(messages))
                continue
            part = slice(starts[place], starts[place] + count)
            starts[place] = part.stop
            version = versions.get((lineage, number))
            if version is None:
                version = versions[lineage, number] = PolicyVersion(lineage, number)
            arrays = tuple([column_T[part] for column_T in self.tokens[place]])
            tokens = (arrays[0], arrays[1], version)
            yield stream, TokenChunk(*tokens, _ENDS[end], queued / 1e6, arrays[2:])


class Outbox:
    """Items of streams that were read but not reported, and, for each stream, the number of tokens
    that were reported but whose storage the manager has not acknowledged yet."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._items: dict[int, list[Item]] = {}
        self._reported: dict[int, int] = {}
        self._unbound: set[int] = set()

    def __len__(self) -> int:
        """Return the number of streams that have something to report."""
        return len(self._items)

    @property
    def unacknowledged(self) -> bool:
        """Whether a running stream has reported tokens that the manager has not acknowledged."""
        return bool(self._reported)

    def accepts_more(self, stream: int) -> bool:
        """Return whether more items of `stream` may be added without waiting for an
        acknowledgment."""
        return stream in self._unbound or self.held(stream) < self._chunk_tokens

    def held(self, stream: int) -> int:
        """Return how many tokens of `stream` were read and not acknowledged."""
        return _tokens(self._items.get(stream, ())) + self._reported.get(stream, 0)

    def unbind(self, stream: int) -> None:
        """Remove the limit on unacknowledged tokens of `stream`, because its request was
        aborted."""
        self._unbound.add(stream)

    def put(self, stream: int, item: Item) -> None:
        """Add the next item of a stream."""
        self._items.setdefault(stream, []).append(item)

    def take(self, most: int) -> TokenReport:
        """Remove the items of up to `most` streams, starting with the stream whose items have
        waited longest; return them as a report."""
        taken: list[tuple[int, Item]] = []
        for stream in list(islice(self._items, most)):
            items = self._items.pop(stream)
            taken += [(stream, item) for item in items]
            if not isinstance(items[-1], TokenChunk) or items[-1].end is not None:
                self.forget(stream)
            else:
                self._reported[stream] = self._reported.get(stream, 0) + _tokens(items)
        return TokenReport.of(taken)

    def acknowledge(self, streams: Iterable[int]) -> None:
        """Record that the reported tokens of these streams are in the store."""
        for stream in streams:
            self._reported.pop(stream, None)

    def forget(self, stream: int) -> None:
        """Remove everything about a stream that has ended or was canceled."""
        self._items.pop(stream, None)
        self._reported.pop(stream, None)
        self._unbound.discard(stream)


def _tokens(items: Iterable[Item]) -> int:
    return sum(len(item.token_ids) for item in items if isinstance(item, TokenChunk))

"""Packs tokens of many streams of an engine into columns, so that one message has all of them.

Pure: no process, no clock. `Outbox` is filled where streams are read, and a `TokenReport` is sent
to the rollout manager (`relay.py`).

Invariants
- Every item that is put in comes out once, and the items of a stream come out in order. The tokens
  of a stream are one span for each policy version, so that the end of a stream is reported at once.
- An item of a stream is added only while fewer than `chunk_tokens` of its tokens are
  unacknowledged. With what has just been read, that is one chunk, which a kill may lose. A stream
  that was aborted has no such limit, because the engine adds no tokens to it.
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
    """Spans of tokens, one after the other; each has one stream, one version and the same columns.

    Attributes:
        runs_R7: For each span: stream, number of tokens, lineage and number of the version, how the
            stream ended with it, index of its columns in `tokens`, microseconds in the engine's
            queue. The end is an index into `_ENDS` or, above that, into `_FAILURES`; the text of a
            failure is the next of `messages`.
        tokens: The token columns of all spans, one entry for each set of columns.
        messages: Texts of the failures.
    """

    runs_R7: npt.NDArray[np.int64]
    tokens: tuple[Arrays, ...]
    messages: tuple[str, ...] = ()

    @classmethod
    def of(cls, items: Iterable[tuple[int, Item]]) -> "TokenReport":
        """Create a report of stream items in this order; adjacent items that form one span are
        joined."""
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
        """Yield the spans as chunks, and the failures, each with its stream."""
        starts, messages = [0] * len(self.tokens), iter(self.messages)
        # Chunks of equal versions share one object.
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
    """Items that were read but not reported, and counts of tokens that were reported but not
    acknowledged."""

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
        """Whether running streams have tokens in a report that was not acknowledged."""
        return bool(self._reported)

    def has_room(self, stream: int) -> bool:
        """Return whether more items of `stream` may be added before an acknowledgment."""
        return stream in self._unbound or self.held(stream) < self._chunk_tokens

    def held(self, stream: int) -> int:
        """Return how many tokens of `stream` were read and not acknowledged."""
        return _tokens(self._items.get(stream, ())) + self._reported.get(stream, 0)

    def unbind(self, stream: int) -> None:
        """Remove the limit of `stream`, because it was aborted."""
        self._unbound.add(stream)

    def put(self, stream: int, item: Item) -> None:
        """Add the next item of a stream."""
        self._items.setdefault(stream, []).append(item)

    def take(self, most: int) -> TokenReport:
        """Remove and return all items of up to `most` streams, those that have waited longest."""
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

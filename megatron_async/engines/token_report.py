"""Tokens of an engine's streams in columns: one message instead of one a stream.

Pure: no process, no clock. `Outbox` is filled where the streams are read, `TokenReport` crosses to
the rollout manager (`relay.py`).

Invariants
- What is put in comes out once, and of each stream in its order: as one run for each version, so
  that an end waits behind no more than that.
- Of each stream fewer than `chunk_tokens` are unacknowledged before something is put in: together
  with what it has read, whoever fills the outbox holds one chunk that a kill may lose. A stream
  whose end has been asked for is not bound: the engine adds nothing to it.
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
    """Runs of tokens, each of one stream, one version and the same columns, one behind the other.

    `runs_R7`: stream, tokens, lineage and number of the version, how the stream ended with it (an
    index into `_ENDS`, or behind it into `_FAILURES`; the failure's text is the next one of
    `messages`), the entry of `tokens` that has its columns, and microseconds in the engine's queue.
    """

    runs_R7: npt.NDArray[np.int64]
    tokens: tuple[Arrays, ...]
    messages: tuple[str, ...] = ()

    @classmethod
    def of(cls, items: Iterable[tuple[int, Item]]) -> "TokenReport":
        """The items of these streams, in this order; neighbors that make one run are joined."""
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
        """Return the runs as chunks, and the failures."""
        starts, messages = [0] * len(self.tokens), iter(self.messages)
        versions: dict[tuple[int, int], PolicyVersion] = {}  # one object for thousands of chunks
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
    """Tokens that were read and not reported, and those that were reported and not acknowledged."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._items: dict[int, list[Item]] = {}
        self._reported: dict[int, int] = {}
        self._unbound: set[int] = set()

    def __len__(self) -> int:
        """Return the number of streams with something to report."""
        return len(self._items)

    @property
    def unacknowledged(self) -> bool:
        """Return whether streams that go on have tokens in a report that was not acknowledged."""
        return bool(self._reported)

    def has_room(self, stream: int) -> bool:
        """Return whether there is room; otherwise there is after an acknowledgement."""
        return stream in self._unbound or self.held(stream) < self._chunk_tokens

    def held(self, stream: int) -> int:
        """Return how many of its tokens were read and not acknowledged."""
        return _tokens(self._items.get(stream, ())) + self._reported.get(stream, 0)

    def unbind(self, stream: int) -> None:
        """Make room for all that a stream has still to bring."""
        self._unbound.add(stream)

    def put(self, stream: int, item: Item) -> None:
        """The next item of a stream."""
        self._items.setdefault(stream, []).append(item)

    def take(self, most: int) -> TokenReport:
        """All items of the streams that have waited longest, `most` streams at most."""
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
        """Forget what was reported of these streams: it is in the store."""
        for stream in streams:
            self._reported.pop(stream, None)

    def forget(self, stream: int) -> None:
        """Forget a stream that has ended, or of which nothing more is wanted."""
        self._items.pop(stream, None)
        self._reported.pop(stream, None)
        self._unbound.discard(stream)


def _tokens(items: Iterable[Item]) -> int:
    return sum(len(item.token_ids) for item in items if isinstance(item, TokenChunk))

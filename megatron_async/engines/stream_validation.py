"""Checks of every chunk and load report that an engine sends. Pure; no socket, no clock.

They run where the answers are read, in the engine's own host, so that they cost the rollout
manager nothing. docs/failures.md has the table.

Invariants
- Whatever a `Door` lets through can be stored and trained: possible tokens, versions in order, an
  end that the tokens bear out.
- A finding is evidence against the engine that sent it, and its request fails (`EngineError`);
  what came before it on the same stream is good and stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.engines.interface import EngineStatus, GenerationRequest, TokenChunk
from megatron_async.trajectory.columns import find_mismatch
from megatron_async.trajectory.token_checks import find_invalid_token
from megatron_async.trajectory.types import PolicyVersion

# A share of the KV cache; what rounding or a moment's overlap adds is no finding.
LARGEST_USAGE = 1.5


@dataclass
class StreamValidator:
    """The stream of one request; `vocabulary` and `longest` (prompt and response) if known."""

    request: GenerationRequest
    vocabulary: int | None = None
    longest: int | None = None
    received: int = 0
    version: PolicyVersion | None = None
    last_token: int | None = None
    ended: bool = False

    def violation(self, chunk: TokenChunk) -> str | None:
        """Return why this chunk, the next of the stream, cannot be; None where it can."""
        if self.ended:
            return "it went on after its end"
        self.ended = chunk.end is not None
        count = len(chunk.token_ids)
        if count:
            found = find_invalid_token(chunk.token_ids, chunk.logprobs, self.vocabulary)
            arrays = (chunk.token_ids, chunk.logprobs, *chunk.columns)
            found = found or find_mismatch(arrays) or self._order(chunk, count)
            if found is not None:
                return found
            self.received += count
            self.version, self.last_token = chunk.version, int(chunk.token_ids[-1])
        return self._end(chunk.end)

    def _order(self, chunk: TokenChunk, count: int) -> str | None:
        most = self.request.max_new_tokens
        if self.received + count > most:
            return f"{self.received + count} tokens came where {most} were asked for"
        if self.version is not None and chunk.version < self.version:
            return f"tokens of version {chunk.version} came after those of {self.version}"
        stops = () if self.request.ignore_eos else self.request.stop_token_ids
        earlier = chunk.token_ids[:-1].tolist() if stops else ()
        for stop in stops:
            if stop == self.last_token or stop in earlier:
                return f"tokens came after the stop token {stop}"
        return None

    def _end(self, end: str | None) -> str | None:
        asked = self.request
        stops = () if asked.ignore_eos else asked.stop_token_ids
        if end == "stop" and self.last_token not in stops:
            return f"it ended with `stop` at token {self.last_token}, which is no stop token"
        if end == "length" and self.received < asked.max_new_tokens and not self._is_full():
            return (
                f"it ended with `length` after {self.received} of {asked.max_new_tokens} tokens, "
                "with room for more"
            )
        return None

    def _is_full(self) -> bool:
        """True where prompt and response are as long as the engine takes."""
        length = len(self.request.input_ids) + self.received
        return self.longest is not None and length >= self.longest


def load_of(loads: Sequence[Mapping[str, Any]], preemptions: float) -> EngineStatus:
    """The load that the parts of a data-parallel server report. Raises ValueError."""
    if not loads:
        raise ValueError("it reports the load of no part")
    usage = max(_number(load["token_usage"], LARGEST_USAGE) for load in loads)
    return EngineStatus(
        running_requests=sum(count_of(load["num_running_reqs"]) for load in loads),
        queued_requests=sum(count_of(load["num_waiting_reqs"]) for load in loads),
        kv_usage=usage,
        preemptions_total=count_of(preemptions),
    )


def count_of(value: Any) -> int:
    """A whole number of 0 or more. Raises ValueError for anything else."""
    number = _number(value, 2.0**53)
    if number != int(number):
        raise ValueError(f"{value!r} is no whole number")
    return int(number)


def _number(value: Any, largest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise ValueError(f"{value!r} is no number from 0 to {largest:g}")
    return float(value)

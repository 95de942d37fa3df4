"""Checks every chunk and load report that an engine sends. The functions are pure: they use no
socket and no clock.

The checks run in the engine's host process, where its replies are read, so that they cost the
rollout manager no time. docs/failures.md lists them in a table.

Invariants
- Chunks that `StreamValidator` accepts can be stored and trained. Their token ids are in the
  vocabulary, their log-probs are valid, versions never decrease within a stream, and the reported
  end of the stream fits its tokens.
- An invalid chunk counts as a failure of the engine, and its request fails with `EngineError`.
  Earlier chunks of the same stream are valid and are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.engines.interface import EngineStatus, GenerationRequest, TokenChunk
from megatron_async.trajectory.columns import find_mismatch
from megatron_async.trajectory.token_checks import find_invalid_token
from megatron_async.trajectory.types import PolicyVersion

# Largest share of the KV cache in use that is accepted in a load report. It exceeds 1 because
# rounding and slots that are counted twice can make an engine report more than 1.
MAX_USAGE = 1.5


@dataclass
class StreamValidator:
    """Checks the chunks of one request's stream.

    Attributes:
        vocabulary: Number of tokens in the model's vocabulary; None if unknown.
        longest: Largest number of tokens of prompt and response together that the engine accepts;
            None if unknown.
        received: Number of tokens received so far.
        version: Policy version of the last chunk.
        last_token: The last token received.
        ended: Whether the stream has ended.
    """

    request: GenerationRequest
    vocabulary: int | None = None
    longest: int | None = None
    received: int = 0
    version: PolicyVersion | None = None
    last_token: int | None = None
    ended: bool = False

    def violation(self, chunk: TokenChunk) -> str | None:
        """Check the next chunk of the stream; return why it is invalid, or None if it is valid."""
        if self.ended:
            return "the stream continued after its end"
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
            return f"{self.received + count} tokens arrived, but {most} were requested"
        if self.version is not None and chunk.version < self.version:
            return (
                f"tokens of version {chunk.version} arrived after tokens of version {self.version}"
            )
        stops = () if self.request.ignore_eos else self.request.stop_token_ids
        earlier = chunk.token_ids[:-1].tolist() if stops else ()
        for stop in stops:
            if stop == self.last_token or stop in earlier:
                return f"tokens arrived after the stop token {stop}"
        return None

    def _end(self, end: str | None) -> str | None:
        asked = self.request
        stops = () if asked.ignore_eos else asked.stop_token_ids
        if end == "stop" and self.last_token not in stops:
            return f"the stream ended with `stop` at token {self.last_token}, not a stop token"
        if end == "length" and self.received < asked.max_new_tokens and not self._is_full():
            return (
                f"the stream ended with `length` after {self.received} of {asked.max_new_tokens} "
                "tokens, although more tokens were possible"
            )
        return None

    def _is_full(self) -> bool:
        """Return whether prompt and response have the largest length that the engine accepts."""
        length = len(self.request.input_ids) + self.received
        return self.longest is not None and length >= self.longest


def load_of(loads: Sequence[Mapping[str, Any]], preemptions: float) -> EngineStatus:
    """Combine the load reports of a server's data-parallel replicas into one: numbers of requests
    are added, and the largest share of a KV cache counts.

    Raises:
        ValueError: If a report is missing or invalid.
    """
    if not loads:
        raise ValueError("the load report is empty")
    usage = max(_number(load["token_usage"], MAX_USAGE) for load in loads)
    return EngineStatus(
        running_requests=sum(count_of(load["num_running_reqs"]) for load in loads),
        queued_requests=sum(count_of(load["num_waiting_reqs"]) for load in loads),
        kv_usage=usage,
        preemptions_total=count_of(preemptions),
    )


def count_of(value: Any) -> int:
    """Return `value` as an integer if it is a whole number of 0 or more.

    Raises:
        ValueError: If it is anything else.
    """
    number = _number(value, 2.0**53)
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def _number(value: Any, largest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise ValueError(f"{value!r} is not a number from 0 to {largest:g}")
    return float(value)

"""Converts SGLang's reports about a running request to token chunks, without I/O.

Invariants
- Tokens are counted: `completion_tokens` of a report is the total number of the request's tokens,
  and only tokens beyond those already seen are new. (SGLang repeats the last token when a request
  is aborted in the queue.)
- A token id is an integer, and a log-prob is a number. SGLang sends each log-prob with the id of
  its token; a report in which the two ids differ is refused.
- All tokens of a chunk have one policy version. A report with tokens from before and after a weight
  update becomes several chunks.
- Every report has the id of the request and the number of its prompt tokens. Only the report of a
  request that was aborted in the queue lacks that number.
- A report is refused if it has more bytes than a report of the whole response may have
  (`most_bytes`).
- Every report has the version of each new token. Only the report of a request that was aborted in
  the queue lacks versions; it has no tokens.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import orjson

from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import GenerationRequest, StreamEnd, TokenChunk
from megatron_async.engines.stream_validation import count_of
from megatron_async.trajectory.types import PolicyVersion

_ENDS = ("stop", "length", "abort")
# Both numbers have at most 12 digits, so that they fit into the integer columns of a token report.
_VERSION = re.compile(r"-?\d{1,12}\.\d{1,12}", re.ASCII)
_FIRST_ERROR_STATUS = 400
# HTTP statuses that mean that the request itself is invalid: bad request, content too large,
# unprocessable content. Other statuses (a missing key or path, too many requests, errors of the
# server) are not caused by the request itself.
_REFUSAL_STATUSES = (400, 413, 422)

_BYTES_OF_A_REPORT = 1 << 20
# Upper bound of the size of one token in a report. SGLang's JSON has about 45 bytes per token: its
# id, its log-prob, and the id again.
_BYTES_OF_A_TOKEN = 128
_LONGEST_REASON = 500
_MALFORMED = (KeyError, IndexError, TypeError, AttributeError, ValueError)


class BadReport(ValueError):
    """Error for a reply of SGLang that does not have the expected form or is itself an error; the
    message contains the reason."""

    def __init__(self, reason: str) -> None:
        """Create the error with `reason` shortened to one line of limited length, because it may
        quote anything that the engine sent."""
        super().__init__(" ".join(reason[:_LONGEST_REASON].split()))


class Refusal(BadReport):
    """Error for a request that SGLang rejects as invalid; the message contains the reason."""


def refusal_of(status: int, message: str, retryable: bool = False) -> BadReport:
    """Return the error for an HTTP status: `Refusal` if the status means that the request itself is
    invalid, otherwise `BadReport`. With `retryable`, it is always `BadReport`."""
    if status in _REFUSAL_STATUSES and not retryable:
        return Refusal(f"the engine rejected it with status {status}: {message}")
    return BadReport(f"status {status}: {message}")


def most_bytes(request: GenerationRequest) -> int:
    """Return an upper bound for the size of one report about `request`, in bytes."""
    return _BYTES_OF_A_REPORT + _BYTES_OF_A_TOKEN * request.max_new_tokens


@dataclass
class StreamDecoder:
    """Converts SGLang's reports about one streamed request, in their order, to chunks of tokens.

    `wire_id` is the id with which the request was sent to the server. The client changes it when it
    sends the request again on another connection. `received` is the number of tokens received so
    far.
    """

    request: GenerationRequest
    wire_id: str
    received: int = 0
    _rest: bytearray = field(default_factory=bytearray)
    _newest: list[int] = field(default_factory=list)

    def chunks(self, data: bytes) -> Iterator[TokenChunk]:
        """Yield the chunks of all reports that are completed by `data`, the next bytes of the
        reply.

        Raises:
            BadReport: If a report is invalid or too large; see `feed`.
        """
        for event in events_of(self._rest, data):
            if event != b"[DONE]":
                yield from self.feed(orjson.loads(event))
        if len(self._rest) > most_bytes(self.request):
            raise BadReport(f"{len(self._rest)} bytes arrived without the end of a report")

    def feed(self, report: Mapping[str, Any]) -> list[TokenChunk]:
        """Return the new tokens in `report` as chunks. If it is the final report, its last chunk
        has `end` set.

        Raises:
            Refusal: If it is an error report that rejects the request.
            BadReport: If it is another error report, lacks tokens or log-probs, or does not have
                the form of a report.
        """
        try:
            return self._feed(report)
        except BadReport:
            raise
        except (*_MALFORMED, OverflowError) as error:
            raise BadReport(f"the engine sent an invalid report: {error!r}") from error

    def _feed(self, report: Mapping[str, Any]) -> list[TokenChunk]:
        if "error" in report:
            raise _error_of(report["error"])
        meta = report["meta_info"]
        if meta["id"] != self.wire_id:
            raise BadReport(
                f"a report about request {meta['id']!r} arrived for request {self.wire_id!r}"
            )
        end = _end_of(meta.get("finish_reason"))
        prompt = len(self.request.input_ids)
        if meta.get("prompt_tokens", prompt if end == "abort" else None) != prompt:
            raise BadReport(
                f"the engine read {meta.get('prompt_tokens')!r} tokens of a prompt of {prompt}"
            )
        token_ids, logprobs = self._take_new_tokens(report, meta, aborted=end == "abort")
        spans = meta.get("weight_versions")
        if spans is None and end == "abort":
            spans = [{"version": meta["weight_version"], "start": 0, "end": 0}]
        # Limited to 1e6 seconds, so that the time in microseconds fits into the integer column of a
        # token report.
        waited = min(max(0.0, float(meta.get("queue_time") or 0.0)), 1e6)
        return self._chunks(token_ids, logprobs, spans, end, waited)

    def _take_new_tokens(
        self, report: Mapping[str, Any], meta: Mapping[str, Any], *, aborted: bool
    ) -> tuple[list[int], list[float]]:
        new = count_of(meta["completion_tokens"]) - self.received
        if new < 0:
            raise BadReport(f"the engine reports {-new} tokens less than before")
        if new == 0:
            return [], []
        every = report["output_ids"]
        token_ids, entries = every[-new:], meta.get("output_token_logprobs", ())[-new:]
        if len(token_ids) != new or len(entries) != new:
            raise BadReport(
                f"{new} new tokens were announced, but {len(token_ids)} tokens and "
                f"{len(entries)} log-probs arrived"
            )
        # If the report repeats earlier tokens, they must equal the tokens received last; otherwise
        # the announced number of new tokens is wrong.
        known = every[:-new]
        size = min(len(known), len(self._newest))
        if known and not aborted and (not size or known[-size:] != self._newest[-size:]):
            raise BadReport(f"{len(every)} tokens arrived, but {new} new tokens were announced")
        logprobs, labels, *_ = map(list, zip(*entries, strict=False))
        _check_values(token_ids, logprobs, labels)
        self._newest = token_ids
        self.received += new
        return token_ids, logprobs

    def _chunks(
        self,
        token_ids: list[int],
        logprobs: list[float],
        spans: Sequence[Mapping[str, Any]],
        end: StreamEnd | None,
        waited: float,
    ) -> list[TokenChunk]:
        first = at = self.received - len(token_ids)
        chunks = []
        for span in spans:
            start = max(count_of(span["start"]), first)
            stop = min(count_of(span["end"]), self.received)
            if start < stop and start == at:
                part = slice(start - first, stop - first)
                queued = 0.0 if start else waited
                chunks.append(_chunk(token_ids[part], logprobs[part], span["version"], queued))
                at = stop
        if at != self.received:
            raise BadReport(f"the version spans {list(spans)} do not cover every token, in order")
        if end is not None:
            last = chunks.pop() if chunks else _chunk([], [], spans[-1]["version"])
            chunks.append(replace(last, end=end))
        return chunks


def _check_values(token_ids: list[Any], logprobs: list[Any], labels: list[Any]) -> None:
    """Check the types of new tokens and log-probs, and that the token id sent with each log-prob
    (`labels`) is that of its token.

    Raises:
        BadReport: If a type or a token id is wrong.
    """
    types = set(map(type, token_ids)) == {int} and set(map(type, logprobs)) <= {float, int}
    if types and token_ids == labels:
        return
    for token, logprob, label in zip(token_ids, logprobs, labels, strict=True):
        if type(token) is not int or type(logprob) not in (float, int):
            raise BadReport(f"a token with id {token!r} and log-prob {logprob!r} arrived")
        if token != label:
            raise BadReport(f"the log-prob of token {label!r} arrived for token {token}")


def _chunk(
    token_ids: Sequence[int], logprobs: Sequence[float], version: str, queued_seconds: float = 0.0
) -> TokenChunk:
    with np.errstate(over="ignore"):  # -1e39 becomes -inf, which `StreamValidator` rejects.
        logprobs_T = np.asarray(logprobs, dtype=np.float32)
    return TokenChunk(
        np.asarray(token_ids, dtype=np.int32),
        logprobs_T,
        parse_version(version),
        queued_seconds=queued_seconds,
    )


@lru_cache(16)
def parse_version(text: str) -> PolicyVersion:
    """Parse the policy version that an engine reports.

    Raises:
        BadReport: If it does not have the form `lineage.number`.
    """
    if _VERSION.fullmatch(text) is None:
        raise BadReport(f"the engine reports weights of version {text!r}")
    return PolicyVersion.parse(text)


def _end_of(reason: Mapping[str, Any] | None) -> StreamEnd | None:
    if reason is None:
        return None
    kind = reason["type"]
    if kind not in _ENDS:
        raise BadReport(f"generation ended for an unknown reason: {dict(reason)}")
    if (reason.get("status_code") or 0) >= _FIRST_ERROR_STATUS:
        raise refusal_of(int(reason["status_code"]), str(reason.get("message")))
    return cast(StreamEnd, kind)


def _error_of(error: Any) -> BadReport:
    if not isinstance(error, Mapping):
        return BadReport(str(error))
    status, message = error.get("code"), str(error.get("message", error))
    if not isinstance(status, int):
        return BadReport(message)
    return refusal_of(status, message, retryable=bool(error.get("retryable", False)))


def events_of(buffer: bytearray, data: bytes) -> list[bytes]:
    """Append `data` to `buffer`, and remove and return the payloads of all server-sent events that
    are complete. An incomplete event stays in `buffer`."""
    buffer += data
    *complete, rest = bytes(buffer).split(b"\n\n")
    buffer[:] = rest
    return [event[len(b"data: ") :] for event in complete if event.startswith(b"data: ")]


def sampling_params(request: GenerationRequest) -> dict[str, Any]:
    """Return SGLang's `sampling_params` for a request. With `ignore_eos`, no stop tokens are sent,
    because the response has a fixed length."""
    settings: SamplingConfig = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "ignore_eos": request.ignore_eos,
        "skip_special_tokens": False,
    }
    if request.stop_token_ids and not request.ignore_eos:
        params["stop_token_ids"] = list(request.stop_token_ids)
    return params

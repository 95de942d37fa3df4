"""Provides the interface of transports, which send a new policy version to the engines.

    sender = make_sender(config.weights, config.engines, torch.device("cpu"), directory)
    sender.connect(addresses)                     # again whenever the set of engines changes
    report = sender.send(buckets, version)        # the engines are idle or paused
    sender.close()

Invariants
- The caller of `send` keeps the engines idle or paused: nothing is generated between the first and
  the last bucket. The version is announced with the last bucket, so no token is ever labeled with a
  version whose weights were loaded only in part.
- Names are checked against the engines' parameters before they are sent, and completeness after.
- Every wait has a limit. After any failure the remaining engines have an undefined mixture of
  weights. `send` raises `EngineCallError`, whose `engine_ids` are the engines that caused the
  failure. The connection is closed, and the next `connect` starts again with the engines that it is
  given.
- Each pipeline stage of the trainer has a sender, on its leading rank, for its own layers. The
  senders send one after the other (`stage_order.py`). The iterator of buckets may be collective: a
  sender that fails leaves the remaining buckets to its caller.
"""

import abc
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.errors import ComponentFailure
from megatron_async.runtime.time_limits import AwakeDeadline
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress, EngineCallError, EngineCalls
from megatron_async.weight_sync.lost_engines import SEARCH_SECONDS
from megatron_async.weight_sync.stage_order import EarlierStageFailed, StageOrder, StageToken
from megatron_async.weight_sync.verify import NameCheck, engine_parameters

NamedTensor = tuple[str, Tensor]
Bucket = Sequence[NamedTensor]
"""Tensors that are sent to the engines together."""

# Time limits, in seconds, of the steps around a transfer. The transfer itself is limited by
# `weights.timeout_seconds`.
HEALTH_SECONDS = 5.0
JOIN_SECONDS = 60.0
LAST_ANSWERS_SECONDS = 1.0
CLEANUP_SECONDS = 20.0
_OPEN_SESSION = "already open"
_ALONE = StageOrder()


@dataclass
class TransferReport:
    """Cost of an update.

    Attributes:
        bytes: Number of bytes of all tensors.
        sent_bytes: Number of bytes that one engine was sent.
        phases: Seconds of each phase. Phases overlap, so their sum is not `seconds`.
    """

    version: PolicyVersion
    buckets: int = 0
    tensors: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Transfer:
    """One sender's part of an update: its buckets, its position in the order, and its report."""

    def __init__(
        self,
        buckets: Iterable[Bucket],
        version: PolicyVersion,
        flush_cache: bool,
        order: StageOrder,
        check: NameCheck,
        timeout_seconds: float,
    ) -> None:
        self.version = version
        self.flush_cache = flush_cache
        self.stage = order.index
        self.is_last = order.last
        self.deadline = AwakeDeadline(timeout_seconds)
        self.report = TransferReport(version)
        self.written: dict[str, Any] = {}
        self._buckets = buckets
        self._order = order
        self._check = check
        self._asked = False
        self._before: StageToken | None = None
        self._began = self._last_lap = time.perf_counter()

    def buckets(self) -> Iterator[Bucket]:
        """Yield the buckets of this stage, after checking and counting their tensors."""
        for bucket in self._buckets:
            self._check.add(name for name, _ in bucket)
            self.report.buckets += 1
            self.report.tensors += len(bucket)
            self.report.bytes += size_of(bucket)
            yield bucket

    def lap(self, phase: str) -> None:
        """Add the time since the previous call to the phase `phase`."""
        now = time.perf_counter()
        self.report.phases[phase] += now - self._last_lap
        self._last_lap = now

    def turn(self) -> Mapping[str, Any]:
        """Wait until the previous stages have sent their layers; return the manifest entries of the
        files that they have written (empty for transports without files)."""
        if self._before is None:
            self._asked = True
            self._before = before = self._order.take()
            self._check.sent_before(before.names)
            self.lap("turn")
        return self._before.written

    def finish(self) -> TransferReport:
        """End the transfer of this stage, pass the token on, and return the report.

        Raises:
            ComponentFailure: If this is the last stage and the whole update lacks a parameter.
        """
        self.turn()
        if self.is_last:
            self._check.finish()
        self._order.hand_on(StageToken(self._check.sent, self.written))
        self.report.seconds = time.perf_counter() - self._began
        return self.report

    def give_up(self) -> None:
        """Pass on a token that reports a failure, so that later stages do not wait."""
        if not self._asked:
            # Ignore the failure of an earlier pipeline stage: its leader, the rank that sends its
            # weights, reports the reason.
            with contextlib.suppress(EarlierStageFailed):
                self._order.take()
        self._order.hand_on(StageToken(failed=True))


class WeightSender(abc.ABC):
    """Sends policy versions to a set of engines; base class of all transports."""

    def __init__(self, settings: WeightsConfig, engines: EngineConfig) -> None:
        self.settings = settings
        self.engine_settings = engines
        self.calls = EngineCalls(())
        """Calls to the connected engines."""
        self._known: frozenset[str] = frozenset()

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """Connect to exactly these engines; does nothing if they are connected already.

        Raises:
            EngineCallError: If engines do not reply, or report other parameters than most; it names
                them.
        """
        if not engines:
            raise ComponentFailure("no engine exists to send weights to")
        if self.calls.engines == tuple(engines):
            return
        self.disconnect()
        self.calls = EngineCalls(engines, self.engine_settings.api_key)
        try:
            self.calls.every("health", None, HEALTH_SECONDS, method="GET")
            answers = self.calls.every(
                "weights_checker", {"action": "checksum"}, self.settings.timeout_seconds
            )
            found = [engine_parameters(answer) for answer in answers]
            # All engines have the parameters of one model for the whole run. A damaged engine may
            # lack some.
            self._known = self._known or max(found, key=lambda p: (found.count(p), len(p)))
            reported = zip(engines, found, strict=True)
            odd = [engine.engine_id for engine, p in reported if p != self._known or not p]
            if odd:
                what = "reported no parameters, or other parameters than most engines"
                raise EngineCallError(f"{', '.join(odd)} {what}", odd)
            self._open_link()
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """Disconnect from the engines; `connect` may follow. A dead engine causes no error."""
        if not self.calls.engines:
            return
        try:
            self._close_link()
        finally:
            self.calls.close()
            self.calls = EngineCalls(())

    def send(
        self,
        buckets: Iterable[Bucket],
        version: PolicyVersion,
        flush_cache: bool = True,
        order: StageOrder = _ALONE,
    ) -> TransferReport:
        """Send the weights of `version` to all connected engines, which must be idle or paused.

        Args:
            buckets: The tensors of this stage.
            version: The policy version.
            flush_cache: Whether engines discard the KV cache of older weights. False with pause
                mode `in_place`.
            order: Order of the senders of several pipeline stages, each with its own buckets.

        Raises:
            EngineCallError: If engines have failed. The weights of all engines are undefined then.
            ComponentFailure: If something else has failed. The weights of all engines are undefined
                then.
        """
        if not self.calls.engines:
            raise ComponentFailure("no engine is connected to send weights to")
        transfer = Transfer(
            buckets,
            version,
            flush_cache,
            order,
            NameCheck(self._known),
            self.settings.timeout_seconds,
        )
        try:
            with transfer.deadline.counting():
                self._transfer(transfer)
                return transfer.finish()
        except BaseException:
            transfer.give_up()
            self._abandon()
            raise

    def close(self) -> None:
        """Disconnect from the engines and release all resources."""
        self.disconnect()

    def _open_link(self) -> None:  # noqa: B027 - most transports need only HTTP
        """Open the connection that the transport needs in addition to HTTP, if any. Engines have
        replied."""

    def _close_link(self) -> None:  # noqa: B027
        """Close what `_open_link` has opened, in whatever state the engines are."""

    @abc.abstractmethod
    def _transfer(self, transfer: Transfer) -> None:
        """Send the buckets of this stage when its turn comes; the last bucket of the last stage
        announces the version."""

    def _begin_session(self, transfer: Transfer) -> None:
        """Wait for the previous stages; in the first stage, open an update session on every engine.

        A session that an earlier failure left open is closed first.
        """
        transfer.turn()
        if transfer.stage:
            return
        try:
            self.calls.every("begin_weight_update", {}, time_left(transfer.deadline))
        except EngineCallError as error:
            if _OPEN_SESSION not in str(error):
                raise
            self._end_sessions_quietly(self.calls)
            self.calls.every("begin_weight_update", {}, time_left(transfer.deadline))
        transfer.lap("begin")

    def _end_session(self, transfer: Transfer) -> None:
        if transfer.is_last:
            self.calls.every("end_weight_update", {}, time_left(transfer.deadline))
            transfer.lap("end")

    def _end_sessions_quietly(self, calls: EngineCalls) -> None:
        """Close any open sessions. An engine without an open session rejects the call, which is
        ignored."""
        for future in calls.start("end_weight_update", lambda _: {}, CLEANUP_SECONDS):
            future.exception()

    def _abandon(self) -> None:
        """Release engines that still wait, after a failed transfer."""
        survivors = EngineCalls(self.calls.engines, self.engine_settings.api_key)
        self.disconnect()
        try:
            self._end_sessions_quietly(survivors)
        finally:
            survivors.close()


def time_left(deadline: AwakeDeadline) -> float:
    """Return the seconds until `deadline`, but at least 0.05, so that a call can still fail."""
    return max(deadline.left, 0.05)


def size_of(bucket: Bucket) -> int:
    """Return the number of bytes of all tensors of a bucket."""
    return sum(tensor.nbytes for _, tensor in bucket)


def with_next(buckets: Iterator[Bucket]) -> Iterator[tuple[Bucket, Bucket | None]]:
    """Yield each bucket together with the following bucket; the last bucket comes with None.

    A sender must know which bucket is the last, and may announce the size of the following bucket
    to the engines in advance.
    """
    held: Bucket | None = None
    for bucket in buckets:
        if held is not None:
            yield held, bucket
        held = bucket
    if held is not None:
        yield held, None


def combined(reports: Sequence[TransferReport]) -> TransferReport:
    """Return one report for all stages: the sum of their costs, and the time of the slowest."""
    total = TransferReport(reports[0].version, seconds=max(r.seconds for r in reports))
    for report in reports:
        total.buckets += report.buckets
        total.tensors += report.tensors
        total.bytes += report.bytes
        total.sent_bytes += report.sent_bytes
        for phase, seconds in report.phases.items():
            total.phases[phase] += seconds
    return total


def seconds_to_give_up(settings: WeightsConfig) -> float:
    """Return the longest time in seconds that a failing attempt can take, with connecting and
    cleaning up.

    At most one of the waits that `weights.timeout_seconds` limits reaches its limit, since the
    attempt fails then. Before it, the group of the previous update is left, engines join, and a
    session that was left open is closed. After it, the new group is ended and left, and its session
    is closed.
    """
    around = HEALTH_SECONDS + JOIN_SECONDS + 3 * LAST_ANSWERS_SECONDS + 5 * CLEANUP_SECONDS
    return settings.timeout_seconds + around + SEARCH_SECONDS


def sending_device(engines: EngineConfig) -> torch.device:
    """Return the kind of device from which weights are sent: CUDA only if the engines use GPUs too.

    NCCL and IPC handles do not reach engines that run on CPUs.
    """
    reached = torch.cuda.is_available() and engines.device != "cpu"
    return torch.device("cuda" if reached else "cpu")

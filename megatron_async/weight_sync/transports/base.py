"""Provides the interface of transports, which send a new policy version to the engines.

    sender = make_sender(config.weights, config.engines, torch.device("cpu"), directory)
    sender.connect(addresses)                     # again whenever the set of engines changes
    report = sender.send(buckets, version)        # the engines are idle or paused
    sender.close()

Invariants
- The caller of `send` keeps the engines idle or paused: nothing is generated between the first and
  the last bucket. The version is announced with the last bucket, so no token is ever labeled with a
  version whose weights were loaded only in part.
- Before tensors are sent, their names are checked against the engines' parameters. After the last
  bucket, it is checked that no parameter is missing.
- Every wait has a limit. After a failed `send`, all engines have an undefined mixture of weights,
  and the connection is closed, so that the caller must call `connect` again. If engines caused the
  failure, the error is an `EngineCallError` whose `engine_ids` name them.
- Each pipeline stage of the trainer has a sender for its own layers, on the stage's leader (the
  rank that sends). The senders send one after the other (`stage_order.py`). Making a bucket may be
  collective over trainer ranks, so after a failure the caller of `send` must iterate over the
  remaining buckets.
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

# Time limits, in seconds, of the steps before and after a transfer. The transfer itself is limited
# by `weights.timeout_seconds`.
HEALTH_SECONDS = 5.0
JOIN_SECONDS = 60.0
LAST_ANSWERS_SECONDS = 1.0
CLEANUP_SECONDS = 20.0
_OPEN_SESSION = "already open"
_ALONE = StageOrder()


@dataclass
class TransferReport:
    """Cost of sending one policy version to the engines.

    Attributes:
        buckets: Number of buckets, which are tensors that are sent together.
        tensors: Number of tensors.
        bytes: Number of bytes of all tensors.
        sent_bytes: Number of bytes that one engine was sent; the largest if they differ.
        seconds: Duration of the transfer.
        phases: Seconds of each phase, by name. Phases overlap, so their sum is not `seconds`.
    """

    version: PolicyVersion
    buckets: int = 0
    tensors: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Transfer:
    """The part of a weight update that one sender transfers: its buckets, the order of the senders,
    the check of names, the time limit, and the report of the cost."""

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
        """Yield the buckets of this sender's pipeline stage; check the names of their tensors, and
        count them in the report."""
        for bucket in self._buckets:
            self._check.add(name for name, _ in bucket)
            self.report.buckets += 1
            self.report.tensors += len(bucket)
            self.report.bytes += size_of(bucket)
            yield bucket

    def lap(self, phase: str) -> None:
        """Add the time since the previous call of `lap` to the phase `phase` of the report."""
        now = time.perf_counter()
        self.report.phases[phase] += now - self._last_lap
        self._last_lap = now

    def turn(self) -> Mapping[str, Any]:
        """Wait until the previous pipeline stages have sent their layers; return the manifest
        entries of the files that they have written (empty for transports without files)."""
        if self._before is None:
            self._asked = True
            self._before = before = self._order.take()
            self._check.sent_before(before.names)
            self.lap("turn")
        return self._before.written

    def finish(self) -> TransferReport:
        """End the transfer of this sender's pipeline stage, let the next stage send, and return the
        report.

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
        """Report a failure to the next pipeline stage, so that later stages do not wait."""
        if not self._asked:
            # Ignore a failure of an earlier pipeline stage, because that stage's sender raises it.
            with contextlib.suppress(EarlierStageFailed):
                self._order.take()
        self._order.hand_on(StageToken(failed=True))


class WeightSender(abc.ABC):
    """Sends the weights of policy versions to a set of engines; base class of all transports."""

    def __init__(self, settings: WeightsConfig, engines: EngineConfig) -> None:
        self.settings = settings
        self.engine_settings = engines
        self.calls = EngineCalls(())
        """HTTP calls to the connected engines."""
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
            # The right set of parameters is the one that most engines report; it is kept, because
            # all engines have the same model for the whole run. A damaged engine may lack some
            # parameters.
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
        """Disconnect from the engines, so that `connect` may be called again. Dead engines cause no
        error."""
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
            buckets: The tensors of this sender's pipeline stage, in groups that are sent together.
            version: The policy version.
            flush_cache: Whether engines discard their KV cache, which older weights have computed.
                It must be False if engines are paused with the mode `in_place`, whose running
                requests keep it.
            order: Position of this sender among the senders of several pipeline stages.

        Raises:
            EngineCallError: If engines have failed. The weights of all engines are undefined then.
            ComponentFailure: If the transfer has failed for another reason. The weights of all
                engines are undefined then.
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
        """Open the connection that the transport needs in addition to HTTP, if any. It is called
        after all engines have replied to an HTTP call."""

    def _close_link(self) -> None:  # noqa: B027
        """Close the connection that `_open_link` has opened, even if engines are dead or do not
        reply."""

    @abc.abstractmethod
    def _transfer(self, transfer: Transfer) -> None:
        """Wait until the previous pipeline stages have sent, and then send the buckets of this
        stage. The last bucket of the last stage announces the version to the engines."""

    def _begin_session(self, transfer: Transfer) -> None:
        """Wait until the previous pipeline stages have sent; in the first stage, open an update
        session on every engine.

        An update session tells an engine that calls with weights follow. If a failed update has
        left a session open, it is closed first.
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
        """Close the update sessions of all engines. An engine without an open session rejects the
        call; this error is ignored."""
        for future in calls.start("end_weight_update", lambda _: {}, CLEANUP_SECONDS):
            future.exception()

    def _abandon(self) -> None:
        """After a failed transfer, disconnect, and close the engines' update sessions, so that no
        engine waits for further weights."""
        survivors = EngineCalls(self.calls.engines, self.engine_settings.api_key)
        self.disconnect()
        try:
            self._end_sessions_quietly(survivors)
        finally:
            survivors.close()


def time_left(deadline: AwakeDeadline) -> float:
    """Return the seconds until `deadline`, but at least 0.05: a call that starts after the deadline
    still needs a positive time limit."""
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
    """Return one report for the senders of all pipeline stages: `seconds` is the time of the
    slowest sender, and all other numbers are sums."""
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
    """Return an upper bound, in seconds, for the time that a failing attempt to send weights can
    take, including connecting and cleaning up.

    An attempt fails as soon as a wait reaches its limit `weights.timeout_seconds`, so that limit
    counts once. The limits of the following steps are added: leaving the group of the previous
    update, joining the new group, and closing a session that was left open; after the failure,
    finding the engines at fault, ending and leaving the new group, and closing its session.
    """
    around = HEALTH_SECONDS + JOIN_SECONDS + 3 * LAST_ANSWERS_SECONDS + 5 * CLEANUP_SECONDS
    return settings.timeout_seconds + around + SEARCH_SECONDS


def sending_device(engines: EngineConfig) -> torch.device:
    """Return the kind of device from which weights are sent: CUDA only if the engines use GPUs too.

    Engines that run on CPUs can receive neither NCCL broadcasts nor CUDA IPC handles.
    """
    reached = torch.cuda.is_available() and engines.device != "cpu"
    return torch.device("cuda" if reached else "cpu")

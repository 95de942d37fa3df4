"""Transports of a new policy version to the engines: the interface, and what all share.

    sender = make_sender(config.weights, config.engines, torch.device("cpu"), directory)
    sender.connect(addresses)                     # again whenever the set of engines changes
    report = sender.send(buckets, version)        # the engines are idle or paused
    sender.close()

Invariants
- The caller of `send` keeps the engines idle or paused; nothing is generated between its first and
  its last bucket. The version is announced with the last bucket, so no token is ever labeled with
  weights that were only partly there.
- Names are checked against the engines' own parameters before they are sent, completeness after.
- Every wait has a limit. After any failure the engines that are left hold an undefined mixture:
  `send` raises `EngineCallError` (its `engine_ids` are the engines at fault), the connection is
  torn down, and the next `connect` starts afresh with whichever engines it is given.
- Each pipeline stage of the trainer has a sender (on its leading rank) for its own layers; they
  send one after the other (`stage_order.py`). The buckets' iterator may be collective: a sender
  that fails leaves the rest of it to its caller.
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

# Limits of what surrounds a transfer, which has `weights.timeout_seconds`.
HEALTH_SECONDS = 5.0
JOIN_SECONDS = 60.0
LAST_ANSWERS_SECONDS = 1.0
CLEANUP_SECONDS = 20.0
_OPEN_SESSION = "already open"
_ALONE = StageOrder()


@dataclass
class TransferReport:
    """Cost of an update. `phases` are seconds; they overlap, so their sum is not `seconds`.

    `bytes` are those of the tensors, `sent_bytes` what one engine was sent of them.
    """

    version: PolicyVersion
    buckets: int = 0
    tensors: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Transfer:
    """A sender's share of an update: its buckets, its turn, and what is counted on the way."""

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
        """This stage's buckets, their names checked."""
        for bucket in self._buckets:
            self._check.add(name for name, _ in bucket)
            self.report.buckets += 1
            self.report.tensors += len(bucket)
            self.report.bytes += size_of(bucket)
            yield bucket

    def lap(self, phase: str) -> None:
        """Put the time since the last lap on `phase`."""
        now = time.perf_counter()
        self.report.phases[phase] += now - self._last_lap
        self._last_lap = now

    def turn(self) -> Mapping[str, Any]:
        """Wait until the stages before have sent theirs; what they have written."""
        if self._before is None:
            self._asked = True
            self._before = before = self._order.take()
            self._check.sent_before(before.names)
            self.lap("turn")
        return self._before.written

    def finish(self) -> TransferReport:
        """Everything was sent. Raises ComponentFailure if the whole update lacks a parameter."""
        self.turn()
        if self.is_last:
            self._check.finish()
        self._order.hand_on(StageToken(self._check.sent, self.written))
        self.report.seconds = time.perf_counter() - self._began
        return self.report

    def give_up(self) -> None:
        """Give up after a failure; the stages behind must not wait."""
        if not self._asked:
            with contextlib.suppress(EarlierStageFailed):  # its own leader has the reason
                self._order.take()
        self._order.hand_on(StageToken(failed=True))


class WeightSender(abc.ABC):
    """Sends policy versions to a set of engines."""

    def __init__(self, settings: WeightsConfig, engines: EngineConfig) -> None:
        self.settings = settings
        self.engine_settings = engines
        self.calls = EngineCalls(())
        """Calls to the connected engines."""
        self._known: frozenset[str] = frozenset()

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """Make ready to send to exactly these engines; does nothing if that is so already.

        Raises EngineCallError naming the engines that do not answer, or not as the others do.
        """
        if not engines:
            raise ComponentFailure("there is no engine to send weights to")
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
            # The parameters are those of one model as long as the run lasts; damage loses some.
            self._known = self._known or max(found, key=lambda p: (found.count(p), len(p)))
            reported = zip(engines, found, strict=True)
            odd = [engine.engine_id for engine, p in reported if p != self._known or not p]
            if odd:
                what = "reported no parameters of the model, or others than the other engines"
                raise EngineCallError(f"{', '.join(odd)} {what}", odd)
            self._open_link()
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """Leave the engines alone; `connect` may follow. Never raises for a dead engine."""
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
        """Make all connected engines hold `version`. They must be paused.

        `flush_cache=False` keeps the KV cache that older weights made (pause mode `in_place`).
        `order` is that of the senders of several pipeline stages, each with buckets of its own.
        Raises EngineCallError or ComponentFailure; then the engines' weights are undefined.
        """
        if not self.calls.engines:
            raise ComponentFailure("weights were to be sent before any engine was connected")
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
        """Release everything."""
        self.disconnect()

    def _open_link(self) -> None:  # noqa: B027 - most transports need HTTP alone
        """Open what the transport needs beside HTTP; engines answer."""

    def _close_link(self) -> None:  # noqa: B027
        """Undo `_open_link`, whatever state the engines are in."""

    @abc.abstractmethod
    def _transfer(self, transfer: Transfer) -> None:
        """Send this stage's buckets in its turn; the last stage's last one with the version."""

    def _begin_session(self, transfer: Transfer) -> None:
        """Wait for this stage's turn; the first stage opens a session on every engine.

        A session that a failure left open is closed.
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
        """Close whatever sessions are open; engines without one refuse, which is fine."""
        for future in calls.start("end_weight_update", lambda _: {}, CLEANUP_SECONDS):
            future.exception()

    def _abandon(self) -> None:
        """Free the engines that still wait after a failed transfer."""
        survivors = EngineCalls(self.calls.engines, self.engine_settings.api_key)
        self.disconnect()
        try:
            self._end_sessions_quietly(survivors)
        finally:
            survivors.close()


def time_left(deadline: AwakeDeadline) -> float:
    """Seconds until `deadline`; at least a moment, so that a call can fail."""
    return max(deadline.left, 0.05)


def size_of(bucket: Bucket) -> int:
    """Bytes of all its tensors."""
    return sum(tensor.nbytes for _, tensor in bucket)


def with_next(buckets: Iterator[Bucket]) -> Iterator[tuple[Bucket, Bucket | None]]:
    """Each bucket with the one after it, None after the last."""
    held: Bucket | None = None
    for bucket in buckets:
        if held is not None:
            yield held, bucket
        held = bucket
    if held is not None:
        yield held, None


def combined(reports: Sequence[TransferReport]) -> TransferReport:
    """Add the costs of all stages; they end together."""
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
    """Longest time of an attempt that fails, connecting and cleaning up included.

    Of the waits that have `weights.timeout_seconds` at most one runs to its end, since it fails
    then. Around it: the group of the update before is left, engines join, a session that was left
    open is closed; after it the new group is ended and left, and its session closed.
    """
    around = HEALTH_SECONDS + JOIN_SECONDS + 3 * LAST_ANSWERS_SECONDS + 5 * CLEANUP_SECONDS
    return settings.timeout_seconds + around + SEARCH_SECONDS


def sending_device(engines: EngineConfig) -> torch.device:
    """The engines' kind of device: NCCL and IPC handles do not reach engines that run on CPUs."""
    reached = torch.cuda.is_available() and engines.device != "cpu"
    return torch.device("cuda" if reached else "cpu")

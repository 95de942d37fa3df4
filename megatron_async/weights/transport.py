"""How a new policy version reaches the engines: the interface, and what all transports share.

    sender = make_sender(config.weights, config.engines, torch.device("cpu"), directory)
    sender.connect(addresses)                     # again whenever the set of engines changes
    report = sender.send(buckets, version)        # the engines are paused
    sender.close()

Invariants
- Engines are paused by whoever calls `send`; nothing is generated between its first and its last
  bucket. The version is announced with the last bucket, so no token is ever labelled with weights
  that were only partly there.
- Names are checked against the engines' own parameters before they are sent, completeness after.
- Every wait has a limit. After any failure the engines that are left hold an undefined mixture:
  `send` raises `EngineCallError` (its `engine_ids` are the engines to blame), the connection is
  torn down, and the next `connect` starts afresh with whichever engines it is given.
- Only rank 0 of the trainer owns a sender; the buckets' iterator may be collective, and is always
  exhausted unless the send fails.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weights.http import EngineAddress, EngineCallError, EngineCalls
from megatron_async.weights.verify import NameCheck, check_same, engine_parameters

NamedTensor = tuple[str, Tensor]
Bucket = Sequence[NamedTensor]

_HEALTH_SECONDS = 5.0
_CLEANUP_SECONDS = 20.0
_OPEN_SESSION = "already open"


@dataclass(frozen=True)
class TransferReport:
    """What one update cost. Seconds are those of the sender; phases overlap."""

    version: PolicyVersion
    buckets: int
    tensors: int
    bytes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)


class Stopwatch:
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Put the time since the last lap on `phase`."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now


class WeightSender(abc.ABC):
    """Sends policy versions to a set of engines."""

    def __init__(self, settings: WeightsConfig, engines: EngineConfig) -> None:
        self.settings = settings
        self.engine_settings = engines
        self._calls: EngineCalls | None = None
        self._known: frozenset[str] = frozenset()

    @property
    def calls(self) -> EngineCalls:
        """Calls to the connected engines. Raises ComponentFailure before `connect`."""
        if self._calls is None:
            raise ComponentFailure("weights were to be sent before any engine was connected")
        return self._calls

    @property
    def engines(self) -> tuple[EngineAddress, ...]:
        """The connected engines."""
        return () if self._calls is None else self._calls.engines

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """Make ready to send to exactly these engines; does nothing if that is so already.

        Raises EngineCallError naming the engines that do not answer, and ComponentFailure if they
        do not all run the same model.
        """
        if not engines:
            raise ComponentFailure("there is no engine to send weights to")
        if self._calls is not None and self._calls.engines == tuple(engines):
            return
        self.disconnect()
        self._calls = EngineCalls(engines, self.engine_settings.api_key)
        try:
            self.calls.every("health", None, _HEALTH_SECONDS, method="GET")
            answers = self.calls.every(
                "weights_checker", {"action": "checksum"}, self.settings.timeout_seconds
            )
            known = {engine_parameters(answer) for answer in answers}
            if len(known) != 1:
                raise ComponentFailure("the engines do not all run the same model")
            self._known = known.pop()
            self._open_link()
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """Leave the engines alone; `connect` may follow. Never raises for a dead engine."""
        if self._calls is None:
            return
        try:
            self._close_link()
        finally:
            self._calls.close()
            self._calls = None

    def send(
        self, buckets: Iterable[Bucket], version: PolicyVersion, flush_cache: bool = True
    ) -> TransferReport:
        """Make all connected engines hold `version`. They must be paused.

        `flush_cache=False` keeps the KV cache that older weights made (pause mode `in_place`).
        Raises EngineCallError or ComponentFailure; then the engines' weights are undefined.
        """
        calls = self.calls
        watch = Stopwatch()
        check = NameCheck(self._known)
        counts = [0, 0, 0]
        deadline = time.monotonic() + self.settings.timeout_seconds
        try:
            self._transfer(_counted(buckets, check, counts), version, flush_cache, deadline, watch)
            check.finish()
        except BaseException:
            self._abandon(calls)
            raise
        return TransferReport(
            version,
            buckets=counts[0],
            tensors=counts[1],
            bytes=counts[2],
            seconds=sum(watch.phases.values()),
            phases=watch.phases,
        )

    def checksums(self) -> dict[str, str]:
        """Engine id -> checksum over everything that the engine holds."""
        answers = self.calls.every(
            "weights_checker", {"action": "checksum"}, self.settings.timeout_seconds
        )
        names = [engine.engine_id for engine in self.calls.engines]
        return {
            name: str(answer["per_engine_checksum"])
            for name, answer in zip(names, answers, strict=True)
        }

    def verify_same(self, version: PolicyVersion) -> str:
        """The checksum that all engines report. Raises ComponentFailure if they differ."""
        checksums = self.checksums()
        check_same(checksums, version)
        return next(iter(checksums.values()))

    def close(self) -> None:
        """Release everything."""
        self.disconnect()

    @abc.abstractmethod
    def _open_link(self) -> None:
        """What the transport needs beside HTTP; engines answer."""

    @abc.abstractmethod
    def _close_link(self) -> None:
        """Undo `_open_link`, whatever state the engines are in."""

    @abc.abstractmethod
    def _transfer(
        self,
        buckets: Iterator[Bucket],
        version: PolicyVersion,
        flush_cache: bool,
        deadline: float,
        watch: Stopwatch,
    ) -> None:
        """Send all buckets, the last one with the version."""

    def _begin_session(self, deadline: float) -> None:
        """Open a weight-update session on every engine, closing one that a failure left open."""
        try:
            self.calls.every("begin_weight_update", {}, time_left(deadline))
        except EngineCallError as error:
            if _OPEN_SESSION not in str(error):
                raise
            self._end_sessions_quietly(self.calls)
            self.calls.every("begin_weight_update", {}, time_left(deadline))

    def _end_session(self, deadline: float) -> None:
        self.calls.every("end_weight_update", {}, time_left(deadline))

    def _end_sessions_quietly(self, calls: EngineCalls) -> None:
        """Close whatever sessions are open; engines without one refuse, which is fine."""
        for future in calls.start("end_weight_update", lambda _: {}, _CLEANUP_SECONDS):
            future.exception()

    def _abandon(self, calls: EngineCalls) -> None:
        """After a failed transfer: free the engines that still wait for us."""
        self.disconnect()
        survivors = EngineCalls(calls.engines, self.engine_settings.api_key)
        try:
            self._end_sessions_quietly(survivors)
        finally:
            survivors.close()


def time_left(deadline: float) -> float:
    """Seconds until `deadline` (of time.monotonic); at least a moment, so that a call can fail."""
    return max(deadline - time.monotonic(), 0.05)


def with_last(buckets: Iterator[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Each bucket with whether it is the last one (looks one bucket ahead)."""
    try:
        held = next(buckets)
    except StopIteration:
        raise ValueError("an update without any tensor") from None
    for bucket in buckets:
        yield held, False
        held = bucket
    yield held, True


def _counted(buckets: Iterable[Bucket], check: NameCheck, counts: list[int]) -> Iterator[Bucket]:
    """The buckets, checked; `counts` becomes [buckets, tensors, bytes]."""
    for bucket in buckets:
        check.add(name for name, _ in bucket)
        counts[0] += 1
        counts[1] += len(bucket)
        counts[2] += sum(tensor.nbytes for _, tensor in bucket)
        yield bucket


def make_sender(
    settings: WeightsConfig,
    engines: EngineConfig,
    device: torch.device,
    directory: Path,
) -> WeightSender:
    """The sender that `weights.transport` names.

    `device` is the engines' kind of device; `directory` is where `disk` publishes (a file system
    that the engines share). Raises UserError for a transport that does not exist.
    """
    from megatron_async.weights.disk import DiskSender
    from megatron_async.weights.distributed import DistributedSender
    from megatron_async.weights.tensor import TensorSender

    if settings.transport == "distributed":
        return DistributedSender(settings, engines, device)
    if settings.transport == "tensor":
        return TensorSender(settings, engines)
    if settings.transport == "disk":
        return DiskSender(settings, engines, directory)
    raise UserError(
        f"weights.transport is {settings.transport!r}; this version has distributed, tensor, disk"
    )

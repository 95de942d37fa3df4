"""Sends weights by broadcasts over a process group, in which the sender is rank 0 and the
tensor-parallel ranks of all engines are the other ranks.

The backend is gloo or NCCL.

Invariants
- Each pipeline stage has its own group, in which its sender is rank 0. Engines join the group with
  SGLang's `init_custom_process_group`. The sender joins it with a gloo or NCCL backend object that
  it creates itself, with the same keys in the rendezvous store as SGLang (`rendezvous_store`). The
  object is not registered in `torch.distributed`. So the trainer's default group and torch's global
  tables are not changed, and the sender can discard the group at any time.
- Each group has a new port, and a name that no trainer on any host has used before, because an
  engine rejects a name that it knows.
- A dead engine does not block the sender. Until the deadline, it polls both the broadcast and the
  HTTP calls that have announced the bucket, and the first failure of either ends the update. Calls
  that may block inside NCCL (the first broadcast of a group, and its end) run on a thread that is
  abandoned if it hangs.
- Buckets are sets of tensors that are broadcast together. While one bucket is transferred, the next
  is gathered. While an engine loads one, the next is transferred; in the engine, hooks receive it
  ahead (`engines/sglang/weight_updater.py`). Only one announcement at a time is pending at an
  engine.
"""

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.errors import ComponentFailure
from megatron_async.runtime.time_limits import AwakeDeadline
from megatron_async.weight_sync.http import address_toward, failures_of, gather, raise_together
from megatron_async.weight_sync.lost_engines import raise_lost, raise_own_failures
from megatron_async.weight_sync.nccl_errors import errors_raised_by_wait
from megatron_async.weight_sync.prefetch import load_format
from megatron_async.weight_sync.transports.base import (
    CLEANUP_SECONDS,
    JOIN_SECONDS,
    LAST_ANSWERS_SECONDS,
    Bucket,
    Transfer,
    WeightSender,
    size_of,
    time_left,
    with_next,
)
from megatron_async.weight_sync.transports.flat_bucket import Buffers, FlatBucket

_FIRST_POLL_SECONDS = 5e-5
_LONGEST_POLL_SECONDS = 5e-4
# NCCL's own time limit, a day, so that it never matters. The deadline of the update comes earlier
# and aborts the group; unlike NCCL's limit, it counts only time in which this process runs.
_LATER_SECONDS = 86_400.0

_logger = logging.getLogger(__name__)
Answers = Sequence[Future[dict[str, Any]]]


def rendezvous_store(store: dist.Store, name: str, device: str) -> dist.Store:
    """Return a view of `store` with the key prefixes that SGLang uses when it creates the group
    `name` for this kind of device, so that the sender finds the engines' keys."""
    by_group = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    return dist.PrefixStore(f"{device}/", by_group)


class _Link:
    """The process group of one sender with the engines: a gloo or NCCL backend object that is not
    registered in `torch.distributed`."""

    def __init__(self, name: str, backend: str, listener: socket.socket, world_size: int) -> None:
        self.name = name
        self.backend = backend
        self.world_size = world_size
        self.port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(
            str(listener.getsockname()[0]),
            self.port,
            world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_SECONDS),
            master_listen_fd=listener.detach(),
        )
        self._group: Any = None
        self._work: Any = None
        self._ended: Future[None] | None = None

    def join(self) -> None:
        """Join the group; blocks until all engines have joined, or `JOIN_SECONDS` have passed."""
        limit = timedelta(seconds=JOIN_SECONDS)
        device = "cpu" if self.backend == "gloo" else "cuda"
        store = rendezvous_store(self._store, self.name, device)
        if self.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, 0, self.world_size, timeout=limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            with errors_raised_by_wait():
                self._group = dist.ProcessGroupNCCL(store, 0, self.world_size, options)

    def set_limit(self, seconds: float) -> None:
        """Set the time limit of each later broadcast."""
        self._group._set_default_timeout(timedelta(seconds=seconds))

    def start_first(self, tensor: Tensor) -> Future[None]:
        """Call `start` on a separate thread, because with NCCL the first broadcast of a group
        returns only once all ranks have entered it, and a dead engine never does."""
        # Each thread has its own current CUDA stream. Use the caller's stream, on which the tensor
        # is written, so that the broadcast comes after that.
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

        def start() -> None:
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                self.start(tensor)

        return _run_detached(start)

    def start(self, tensor: Tensor) -> None:
        """Start to broadcast `tensor`. Call `finish` before the next broadcast."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._work = self._group.broadcast([tensor], options)

    @property
    def done(self) -> bool:
        """Whether the broadcast has ended, successfully or not."""
        return bool(self._work.is_completed())

    def finish(self) -> None:
        """Check that the broadcast has succeeded, and release its tensor. Call this once `done` is
        true.

        Raises:
            RuntimeError: If the broadcast has failed.
        """
        self._work.wait()
        # Drop the handle, because it keeps the memory of the sent tensor allocated.
        self._work = None

    def begin_drop(self) -> None:
        """Start to close all connections of the group in the background, even during a broadcast.

        The handle of a running broadcast keeps gloo's connections open as long as anything refers
        to it, even the traceback of an exception. Therefore only this object refers to it, and
        drops it here.
        """
        self._work = None
        if self._group is not None:
            self._ended = _run_detached(self._group.abort)
            self._group = None

    def drop(self) -> None:
        """Close all connections of the group, and wait at most `CLEANUP_SECONDS` until they are
        closed."""
        self.begin_drop()
        if self._ended is None:
            return
        try:
            self._ended.result(CLEANUP_SECONDS)
        except TimeoutError:
            _logger.warning(
                "weight-update group %s did not end within %g s", self.name, CLEANUP_SECONDS
            )


class DistributedSender(WeightSender):
    """Sends weights to engines by broadcasts over a process group, with
    `weights.transport: distributed`."""

    def __init__(
        self, settings: WeightsConfig, engines: EngineConfig, device: torch.device
    ) -> None:
        super().__init__(settings, engines)
        self._device = device
        self._host_buffers = Buffers(torch.device("cpu"))
        self._link: _Link | None = None

    def _open_link(self) -> None:
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        engines = self.calls.engines
        address = address_toward(engines[0].url)
        ranks = self.engine_settings.tensor
        listener = socket.create_server((address, 0), backlog=len(engines) * ranks + 8)
        link = _Link(
            f"megatron-async-{uuid.uuid4().hex}", backend, listener, 1 + ranks * len(engines)
        )
        joins = self.calls.start(
            "init_weights_update_group",
            lambda index: {
                "master_address": address,
                "master_port": link.port,
                "rank_offset": 1 + index * ranks,
                "world_size": link.world_size,
                "group_name": link.name,
                "backend": backend,
            },
            JOIN_SECONDS,
        )
        try:
            link.join()
        except RuntimeError as error:
            _raise_first_failure(joins, LAST_ANSWERS_SECONDS)
            raise ComponentFailure(
                f"the engines failed to join the weight-update group within {JOIN_SECONDS:g} s: "
                f"{error}"
            ) from error
        self._link = link
        gather(joins)
        # A gloo broadcast and its connections cannot be ended before the group's own time limit, so
        # give it the limit of the update.
        by_gloo = link.backend == "gloo"
        link.set_limit(self.settings.timeout_seconds if by_gloo else _LATER_SECONDS)

    def _close_link(self) -> None:
        if self._link is None:
            return
        link, self._link = self._link, None
        leaving = self.calls.start(
            "destroy_weights_update_group", lambda _: {"group_name": link.name}, CLEANUP_SECONDS
        )
        # Tell the engines to leave first: an engine that leaves the group ends the broadcast to
        # itself. An engine that waits in a receive can leave only after the receive has ended, so
        # then close this process's connections, which ends it.
        link.drop()
        for future in leaving:
            future.exception()

    def _transfer(self, transfer: Transfer) -> None:
        announced: Answers = ()
        deadline = transfer.deadline
        # Buffers on a GPU are allocated for each update, because their memory is needed for other
        # purposes between updates. Buffers on the host are kept.
        on_host = self._device.type == "cpu"
        buffers = self._host_buffers if on_host else Buffers(self._device)
        for bucket, following in with_next(transfer.buckets()):
            flat = buffers.flatten(bucket)
            transfer.lap("gather")
            if announced:
                self._wait_for_broadcast(announced, transfer)
                # The engines wait for this bucket already, so broadcast it. Announce it only after
                # they have loaded the previous bucket, because two announcements at the same time
                # could be processed in the wrong order.
                self._require_link().start(flat.bytes_N)
                self._wait_for_answers(announced, deadline)
                transfer.lap("wait for load")
                announced = self._announce(flat, following, transfer)
            else:
                self._begin_session(transfer)
                # Announce the first bucket before its broadcast: no engine waits for it yet, and
                # NCCL's first broadcast of a group returns only once all ranks have entered it.
                announced = self._announce(flat, following, transfer)
                self._start_first(flat.bytes_N, announced, transfer)
            transfer.report.sent_bytes += flat.bytes_N.nbytes
        self._wait_for_broadcast(announced, transfer)
        self._wait_for_answers(announced, deadline)
        transfer.lap("load")
        self._end_session(transfer)

    def _announce(self, flat: FlatBucket, following: Bucket | None, transfer: Transfer) -> Answers:
        """Start HTTP calls that announce a bucket to all engines; return the calls, which end when
        the engines have loaded it. The last bucket of the last pipeline stage announces the version
        too."""
        body: dict[str, Any] = {
            "names": flat.names,
            "dtypes": flat.dtypes,
            "shapes": flat.shapes,
            "group_name": self._require_link().name,
            "load_format": load_format(0 if following is None else size_of(following)),
            "flush_cache": False,
        }
        if following is None and transfer.is_last:
            body["flush_cache"] = transfer.flush_cache
            body["weight_version"] = str(transfer.version)
        seconds = time_left(transfer.deadline) + LAST_ANSWERS_SECONDS
        return self.calls.start("update_weights_from_distributed", lambda _: body, seconds)

    def _start_first(self, tensor: Tensor, announced: Answers, transfer: Transfer) -> None:
        """Start the first broadcast of the group, and wait until the call has returned. With NCCL
        it returns only once all engines have entered the broadcast.

        Raises the same errors as `_wait_for`.
        """
        started = self._require_link().start_first(tensor)
        otherwise = "the engines did not enter the first broadcast"
        self._wait_for(started.done, started.result, otherwise, announced, transfer)

    def _wait_for_broadcast(self, announced: Answers, transfer: Transfer) -> None:
        link = self._require_link()
        otherwise = "the weight broadcast did not end"
        self._wait_for(lambda: link.done, link.finish, otherwise, announced, transfer)
        transfer.lap("broadcast")

    def _wait_for(
        self,
        done: Callable[[], bool],
        result: Callable[[], None],
        otherwise: str,
        announced: Answers,
        transfer: Transfer,
    ) -> None:
        """Poll until `done()` returns True or an engine fails, and then call `result`.

        Args:
            done: Function that returns whether the work has ended.
            result: Function that raises RuntimeError if the work has failed.
            otherwise: Beginning of the error message if the work does not end before the deadline.
            announced: Calls that have announced the bucket to the engines, one for each engine.
            transfer: The transfer, with its deadline.

        Raises:
            EngineCallError: If engines reject the announcement or have caused the failure; it names
                them.
            ComponentFailure: If the deadline passes or the work fails, and no engine is found to be
                the cause.
        """
        pause = _FIRST_POLL_SECONDS
        while not done():
            self._raise_failures(announced)
            if not transfer.deadline.left:
                # Find the engines at fault. An engine that only waits for this rank replies once
                # this rank's connections are closed, and is not at fault. An engine without a reply
                # is frozen or waits for a frozen engine. If all reply, the time limit is too short.
                self._require_link().begin_drop()
                wait(announced, 2 * LAST_ANSWERS_SECONDS)
                raise_together([f for f in failures_of(announced) if f.status is None])
                raise ComponentFailure(
                    f"{otherwise} within weights.timeout_seconds = "
                    f"{self.settings.timeout_seconds:g}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        try:
            result()
        except RuntimeError as error:
            self._require_link().begin_drop()
            raise_lost(announced, self.calls)
            raise ComponentFailure(f"the weight broadcast failed: {error}") from error

    def _wait_for_answers(self, announced: Answers, deadline: AwakeDeadline) -> None:
        """Wait until all engines have loaded the bucket that was announced by these calls.

        Raises:
            EngineCallError: As soon as an engine fails.
        """
        wait(announced, time_left(deadline), return_when=FIRST_EXCEPTION)
        self._raise_failures(announced)
        # No time limit is needed here, because each call has its own.
        gather(announced)

    def _raise_failures(self, announced: Answers) -> None:
        """Raise an EngineCallError if one of these calls has failed. It names the engines that
        caused the failure, which need not be the engine that was called."""
        if raise_own_failures(announced):
            self._require_link().begin_drop()
            raise_lost(announced, self.calls)

    def _require_link(self) -> _Link:
        if self._link is None:
            raise ComponentFailure("no engine is connected to send weights to")
        return self._link


def _run_detached(work: Callable[[], None]) -> Future[None]:
    """Run `work` on a daemon thread; return a future of its result. If `work` hangs, the thread can
    be abandoned, and even the exit of the process does not wait for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `future.result`
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return future


def _raise_first_failure(calls: Answers, wait_seconds: float) -> None:
    """Wait until a call has failed or all have ended, at most `wait_seconds`. Then raise all
    failures so far together; return if there are none."""
    wait(calls, wait_seconds, return_when=FIRST_EXCEPTION)
    raise_together(failures_of(calls))

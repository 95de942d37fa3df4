"""Weights by collective broadcast: the sender is rank 0, the engines' ranks follow (gloo or NCCL).

Invariants
- The group is the sender's own; each pipeline stage has one, in which it is rank 0. It is joined
  on the store path that SGLang's `init_custom_process_group` uses, but as a bare backend: the
  trainer's default group and `torch.distributed`'s global tables are never touched, and it can be
  thrown away at any time.
- Each group has a new port and a name that no trainer, on whatever host, has used before: an engine
  refuses one that it has.
- A dead engine does not hang the sender: broadcasts are polled together with the HTTP calls that
  announce them, up to the deadline; the first failure of either ends the update. What may block
  inside NCCL (a group's first broadcast, its end) runs on a thread that is abandoned if it hangs.
- While one bucket travels, the next is gathered; while an engine loads one, the next travels
  (in an engine, the hooks of `engines/sglang/weight_updater.py` call `prefetch.py`). An engine
  has one announcement at a time.
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
# NCCL's own limit, by the clock; the deadline of the update, in time awake, comes first and aborts.
_LATER_SECONDS = 86_400.0

_logger = logging.getLogger(__name__)
Answers = Sequence[Future[dict[str, Any]]]


def rendezvous_store(store: dist.Store, name: str, device: str) -> dist.Store:
    """Return the store in which SGLang's group of this name meets on this kind of device."""
    by_group = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    return dist.PrefixStore(f"{device}/", by_group)


class _Link:
    """The process group with the engines, as a bare gloo or NCCL backend."""

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
        """Meet the engines; blocks until all are there or the limit passes."""
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
        """The limit of each broadcast from now on."""
        self._group._set_default_timeout(timedelta(seconds=seconds))

    def start_first(self, tensor: Tensor) -> Future[None]:
        """`start`; with NCCL it is done when all ranks have called theirs, or never."""
        # A thread has a current stream of its own; the tensor is written on the caller's.
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

        def start() -> None:
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                self.start(tensor)

        return _run_detached(start)

    def start(self, tensor: Tensor) -> None:
        """Begin to broadcast; `finish` before the next one."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._work = self._group.broadcast([tensor], options)

    @property
    def done(self) -> bool:
        """Return whether the broadcast has ended, one way or the other."""
        return bool(self._work.is_completed())

    def finish(self) -> None:
        """Finish the broadcast after `done`. Raises RuntimeError if it failed."""
        self._work.wait()
        self._work = None  # it holds what was sent

    def begin_drop(self) -> None:
        """Begin to close all connections, whatever is under way.

        A handle keeps gloo's connections open, also one that hangs in an exception's traceback:
        this is the only place that holds it.
        """
        self._work = None
        if self._group is not None:
            self._ended = _run_detached(self._group.abort)
            self._group = None

    def drop(self) -> None:
        """Close all connections, as far as that ends in time."""
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
    """`weights.transport: distributed`."""

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
                f"the engines did not join the weight-update group within {JOIN_SECONDS:g} s: "
                f"{error}"
            ) from error
        self._link = link
        gather(joins)
        # Nothing ends a broadcast of gloo before its own limit, and its connections with it.
        by_gloo = link.backend == "gloo"
        link.set_limit(self.settings.timeout_seconds if by_gloo else _LATER_SECONDS)

    def _close_link(self) -> None:
        if self._link is None:
            return
        link, self._link = self._link, None
        leaving = self.calls.start(
            "destroy_weights_update_group", lambda _: {"group_name": link.name}, CLEANUP_SECONDS
        )
        # An engine that leaves ends what we are sending it; closing our connections ends a receive
        # that an engine has posted, or is stuck in, and then it can leave as well.
        link.drop()
        for future in leaving:
            future.exception()

    def _transfer(self, transfer: Transfer) -> None:
        announced: Answers = ()
        deadline = transfer.deadline
        # Between updates a device's memory is for other things.
        on_host = self._device.type == "cpu"
        buffers = self._host_buffers if on_host else Buffers(self._device)
        for bucket, following in with_next(transfer.buckets()):
            flat = buffers.flatten(bucket)
            transfer.lap("gather")
            if announced:
                self._wait_for_broadcast(announced, transfer)
                # Engines listen for it already; but announced it is only when they have loaded the
                # one before: two calls under way could overtake each other.
                self._require_link().start(flat.bytes_N)
                self._wait_for_answers(announced, deadline)
                transfer.lap("wait for load")
                announced = self._announce(flat, following, transfer)
            else:
                self._begin_session(transfer)
                # The other way round: nobody listens yet, and NCCL's first broadcast of a group
                # does not return before all ranks have called it.
                announced = self._announce(flat, following, transfer)
                self._start_first(flat.bytes_N, announced, transfer)
            transfer.report.sent_bytes += flat.bytes_N.nbytes
        self._wait_for_broadcast(announced, transfer)
        self._wait_for_answers(announced, deadline)
        transfer.lap("load")
        self._end_session(transfer)

    def _announce(self, flat: FlatBucket, following: Bucket | None, transfer: Transfer) -> Answers:
        """Announce a bucket; the last one with the version."""
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
        """Raises, as `_wait_for`, also if the call does not return."""
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
        """Wait; raise as soon as an engine refuses what was announced, or at the deadline.

        A failure names the engines that have caused it, where they can be found.
        """
        pause = _FIRST_POLL_SECONDS
        while not done():
            self._raise_failures(announced)
            if not transfer.deadline.left:
                # An engine that only waits for us answers when our connections close: then the
                # limit is too short. One that does not is frozen, or waits for one that is.
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
        """Wait until all engines have loaded the bucket. Raises as soon as one fails."""
        wait(announced, time_left(deadline), return_when=FIRST_EXCEPTION)
        self._raise_failures(announced)
        gather(announced)  # bounded: each call has a limit

    def _raise_failures(self, announced: Answers) -> None:
        """Raise if a call has failed, for the engines that have caused it."""
        if raise_own_failures(announced):
            self._require_link().begin_drop()
            raise_lost(announced, self.calls)

    def _require_link(self) -> _Link:
        if self._link is None:
            raise ComponentFailure("weights were to be sent before the engines were connected")
        return self._link


def _run_detached(work: Callable[[], None]) -> Future[None]:
    """Run it on a thread that nobody has to wait for, not even the end of the process."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return future


def _raise_first_failure(calls: Answers, wait_seconds: float) -> None:
    """Raise the failures there are as soon as there is one, or after that long."""
    wait(calls, wait_seconds, return_when=FIRST_EXCEPTION)
    raise_together(failures_of(calls))

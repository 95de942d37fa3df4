"""Verifiers in processes of their own, with a hard limit on every judgement.

Invariants
- A try ends within `task.verifier_timeout_seconds` (plus a process start, where one is due): a
  process that hangs is killed and the next judgement starts another one.
- A judgement whose process died is made once more: a kill from outside must not cost an answer its
  reward. One that timed out, or crashed twice, is scored as `task.on_verifier_timeout` says; one
  whose verifier raised is a wrong answer. Each kind is counted in the judgement's `detail`.
- Closing leaves no process behind.

`VerifierWorker` owns one process and blocks; `LocalVerifierPool` runs several from threads of this
process, `RayVerifierPool` one in each of several Ray actors. Both pools have the same face.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import ComponentFailure, ProcessKilled, UserError
from megatron_async.tasks.base import Judgement
from megatron_async.trajectory.types import Prompt

START_TIMEOUT_SECONDS: Final = 120.0
_STOP_TIMEOUT_SECONDS: Final = 5.0
_RAY_SLACK_SECONDS: Final = 30.0
_TRIES: Final = 2  # of a judgement: a second crash is its own fault
_STARTS: Final = 5  # of a process that is killed again and again
_READ_BYTES: Final = 65536
_ERROR_TAIL_CHARACTERS: Final = 2000


class VerifierTimeout(TimeoutError):
    """No reply within the limit."""


class VerifierCrash(RuntimeError):
    """The process ended before it replied."""


class VerifierWorker:
    """One verifier process: started when first needed, replaced when it hangs or dies.

    Not for several threads at once. Plain enough for `ray.remote`.
    """

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._child: _Child | None = None
        self.restarts = 0

    def start(self) -> None:
        """Have a process ready. Raises UserError, or ComponentFailure if it does not start."""
        if self._child is not None and not self._child.alive():
            self._discard()
        if self._child is None:
            self._child = self._started()

    def _started(self) -> _Child:
        """A new process; one that is killed before it is ready is followed by another."""
        for _ in range(_STARTS - 1):
            try:
                return _Child.started(self._config)
            except ProcessKilled:
                self.restarts += 1
        return _Child.started(self._config)

    def judge(self, payload: dict[str, Any], text: str) -> Judgement:
        """The verdict, within the limit. Raises only what `start` does."""
        line = json.dumps({"payload": payload, "text": text})
        for last in (False, True):
            try:
                reply = self._ask(line)
                break
            except VerifierTimeout:
                return self._failed("verifier_timeout")
            except VerifierCrash:
                if last:
                    return self._failed("verifier_crash")
        if "error" in reply:
            return Judgement(0.0, {"score": 0.0, "answered": 1.0, "verifier_error": 1.0})
        return Judgement(reply["reward"], reply["detail"])

    def _ask(self, line: str) -> dict[str, Any]:
        """The reply. After VerifierTimeout or VerifierCrash there is no process."""
        self.start()
        assert self._child is not None
        try:
            return self._child.ask(line, self._config.verifier_timeout_seconds)
        except (VerifierTimeout, VerifierCrash):
            self._discard()
            raise

    def pid(self) -> int | None:
        """Process id of the verifier, while there is one."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """Kill the process."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _discard(self) -> None:
        self.close()
        self.restarts += 1

    def _failed(self, kind: str) -> Judgement:
        reward = None if self._config.on_verifier_timeout == "drop" else 0.0
        return Judgement(reward, {"score": 0.0, "answered": 1.0, kind: 1.0})


class _Child:
    """A running `verifier_process` and its two pipes, read and written with deadlines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._unread = b""

    @classmethod
    def started(cls, config: TaskConfig) -> _Child:
        command = [sys.executable, "-m", "megatron_async.tasks.verifier_process"]
        with tempfile.TemporaryFile() as errors:
            child = cls(
                subprocess.Popen(
                    [*command, config.model_dump_json()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            )
            try:
                first = child.read(time.monotonic() + START_TIMEOUT_SECONDS)
            except (VerifierTimeout, VerifierCrash) as error:
                killed = isinstance(error, VerifierCrash) and child.was_killed()
                child.kill()
                errors.seek(0)
                said = errors.read().decode(errors="replace")[-_ERROR_TAIL_CHARACTERS:].strip()
                raise (ProcessKilled if killed else ComponentFailure)(
                    f"a verifier process of task {config.name} did not start ({error}): {said}"
                ) from error
        if "user_error" in first:
            child.kill()
            raise UserError(first["user_error"])
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def was_killed(self) -> bool:
        """Whether a signal ended it; after its output has ended."""
        try:
            return self._process.wait(_STOP_TIMEOUT_SECONDS) < 0
        except subprocess.TimeoutExpired:
            return False

    def ask(self, line: str, limit_seconds: float) -> dict[str, Any]:
        """Send one line, wait for one reply. Raises VerifierTimeout or VerifierCrash."""
        deadline = time.monotonic() + limit_seconds
        self._write(line.encode() + b"\n", deadline)
        return self.read(deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._in, selectors.EVENT_WRITE, deadline)
            try:
                view = view[os.write(self._in, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise VerifierCrash("it closed its input") from error

    def read(self, deadline: float) -> dict[str, Any]:
        """The next reply. Raises VerifierTimeout or VerifierCrash."""
        while b"\n" not in self._unread:
            self._wait(self._out, selectors.EVENT_READ, deadline)
            piece = os.read(self._out, _READ_BYTES)
            if not piece:
                raise VerifierCrash("it ended without a reply")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise VerifierTimeout("no reply within the limit")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_STOP_TIMEOUT_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class _ResponseDecoder:
    """Response tokens to the text that is judged; the tokenizer is loaded when first needed."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._tokenizer: Any = None

    def text(self, response_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            from megatron_async.tasks.text_task import load_tokenizer

            self._tokenizer = load_tokenizer(self._model_path)
        return str(self._tokenizer.decode(list(response_ids), skip_special_tokens=True))


class LocalVerifierPool:
    """`task.verifier_workers` processes, driven by as many threads of this process."""

    def __init__(self, config: TaskConfig, model_path: str) -> None:
        self._decoder = _ResponseDecoder(model_path)
        self._config = config
        self._threads = ThreadPoolExecutor(config.verifier_workers, "verifier")
        self._mine = threading.local()
        self._workers: list[VerifierWorker] = []

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        """Reward (`None`: it failed and is to be dropped) and details."""
        text = self._decoder.text(response_ids)
        loop = asyncio.get_running_loop()
        judgement = await loop.run_in_executor(self._threads, self._judge, prompt.payload, text)
        return judgement.reward, judgement.detail

    def close(self) -> None:
        """End all processes; judgements that wait are given up, running ones end first."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _judge(self, payload: dict[str, Any], text: str) -> Judgement:
        worker = getattr(self._mine, "worker", None)
        if worker is None:
            worker = self._mine.worker = VerifierWorker(self._config)
            self._workers.append(worker)
        return worker.judge(payload, text)  # type: ignore[no-any-return]


class RayVerifierPool:
    """`task.verifier_workers` Ray actors, each with one verifier process. Needs a running Ray.

    `label_selector`: Ray nodes on which they may be.
    """

    def __init__(
        self, config: TaskConfig, model_path: str, label_selector: dict[str, str] | None = None
    ) -> None:
        import ray

        self._decoder = _ResponseDecoder(model_path)
        one_try = config.verifier_timeout_seconds + START_TIMEOUT_SECONDS
        self._limit = _TRIES * one_try + _RAY_SLACK_SECONDS
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=_STARTS)(VerifierWorker)
        actor = actor.options(label_selector=label_selector)
        self._actors = [actor.remote(config) for _ in range(config.verifier_workers)]
        # The processes start while the engines do: rewards that come late would let generation
        # run ahead of the batch it is for. An error of the start is met again by `judge`.
        for actor in self._actors:
            actor.start.remote()
        self._idle: asyncio.Queue[Any] | None = None

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        """Reward (`None`: it failed and is to be dropped) and details.

        Raises ComponentFailure when an actor gives no answer at all.
        """
        from ray.exceptions import RayActorError, RayTaskError

        text = self._decoder.text(response_ids)
        idle = self._queue()
        actor = await idle.get()  # bounded: every holder gives its actor back within the limit
        try:
            # Not `wait_for`: until Python 3.12 it may give a result although it is cancelled.
            async with asyncio.timeout(self._limit):
                judgement = await actor.judge.remote(prompt.payload, text)
        except TimeoutError as error:
            raise ComponentFailure(
                f"a verifier actor gave no answer within {self._limit:.0f} s"
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, ComponentFailure | UserError):
                raise ComponentFailure(str(error.cause)) from error
            raise
        except RayActorError as error:
            raise ComponentFailure(f"a verifier actor died: {error}") from error
        finally:
            idle.put_nowait(actor)
        return judgement.reward, judgement.detail

    def close(self) -> None:
        """End all actors and, with them, their processes."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _queue(self) -> asyncio.Queue[Any]:
        if self._idle is None:
            self._idle = asyncio.Queue()
            for actor in self._actors:
                self._idle.put_nowait(actor)
        return self._idle

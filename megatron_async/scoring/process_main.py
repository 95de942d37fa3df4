"""The program of a scorer process, which runs reward functions, and of its parent, the keeper.

    worker ── requests (pipe) ─┬─▶ scorer ── replies (packets) ─┬─▶ worker
                               └ hang-up ─▶ keeper ── its end ──┘

The worker (`workers.ScorerWorker`) starts the keeper. The keeper forks the scorer process, and
kills the processes that the scorer leaves behind. It adopts all orphaned descendants of the scorer
(Linux "child subreaper"), including descendants that started a separate session. It notices when
the worker closes the pipe (a hang-up), and reports the scorer's end to the worker in the last
packet.

Invariants
- The program imports neither torch nor transformers.
- The keeper kills all processes that the scorer started, and then ends, as soon as the scorer ends,
  the worker dies, or the worker closes the pipe of requests. If the keeper is killed, the scorer
  ends too.
- Only this module uses the pipe of requests and the socket of replies: their descriptors have high
  numbers and are closed on exec. For reward functions standard input is empty. Their standard
  output and standard error go to the log through the keeper, up to `_LOG_BYTES` in total. If there
  is a log file, the causes of failed scores are written to it directly, without that limit, until
  the file has `_MAX_LOG_BYTES`.
- A copy of the scorer process that a reward function forks can neither read requests nor reply.
- Rewards and their components are finite numbers; any other value is an error of the reward.
- Blocking rewards score one response after the other, asynchronous rewards score many concurrently.
  A process runs only one of the two kinds.
"""

import asyncio
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any, BinaryIO

import psutil

from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import UserError
from megatron_async.runtime.prctl import PDEATHSIG, SUBREAPER, prctl
from megatron_async.scoring.frames import (
    ASYNC,
    END_ID,
    START_ID,
    parse_request,
    reply_packet,
)
from megatron_async.scoring.rewards.reward import Reward, asynchronous, build_reward
from megatron_async.scoring.rewards.sample import RewardScore, Sample, Unavailable, sample_of

_HIGH_DESCRIPTOR = 1000
_LOG_BYTES = 16 << 10
_MAX_LOG_BYTES = 1 << 20
_TAIL_BYTES = 2000
_PIECE_BYTES = 4096  # A pipe that is ready accepts this many bytes without blocking.
_REAP_MILLISECONDS = 1000.0
# Time limit in seconds for killing all descendants. Killing is repeated until none is found, and
# each search may take a second on a busy machine.
_END_SECONDS = 60.0
_ERROR_CHARACTERS = 500


class _Replies:
    """Sends a scorer process's replies to its worker, the object that requested the scores.

    Only the process that created this object sends. In a forked copy of that process, an attempt
    to send ends the copy.
    """

    def __init__(self, channel: socket.socket, log: Path | None = None) -> None:
        """Use the socket `channel` for replies.

        Args:
            channel: The socket to the worker.
            log: File for the tracebacks of exceptions in rewards. If None, one line for each
                exception goes to standard error.
        """
        self._channel = channel
        self._pid = os.getpid()
        self._log = log

    def send(self, packet: bytes) -> None:
        """Send a packet to the worker; in a forked copy, end this process instead."""
        if os.getpid() != self._pid:
            os._exit(0)
        self._channel.send(packet)

    def error(self, reward: Reward, error: BaseException) -> dict[str, Any]:
        """Log an exception that `reward` raised; return the content of the reply with the error."""
        what = reward.described(error)
        line = f"reward {reward.display_name} failed: {what}\n"
        if self._log is None:
            print(line, end="", file=sys.stderr)
        else:  # Not printed, because the keeper drops output when a reward has printed too much.
            with (
                suppress(OSError),
                self._log.open("a", 1 << 20, "utf-8", "backslashreplace") as file,
            ):
                text = line + "".join(format_exception(error))
                file.write(text[: max(0, _MAX_LOG_BYTES - file.tell())])
        kind = {"unavailable": True} if isinstance(error, Unavailable) else {}
        return {"error": what[:_ERROR_CHARACTERS], **kind}


def serve(
    settings: ScorerSettings, run_async: bool, requests: BinaryIO, channel: socket.socket
) -> int:
    """Build the rewards, then score the requests that arrive, until the worker closes the pipe
    `requests`.

    Args:
        settings: The rewards and their limits.
        run_async: Whether to run the asynchronous rewards; otherwise the blocking ones are run.
        requests: The pipe of requests.
        channel: The socket for replies.

    Returns:
        The exit code of the scorer process: 0, or 2 if the settings are refused.
    """
    replies = _Replies(channel, _log_file(settings))
    try:
        are_async = [asynchronous(config) for config in settings.parts]
        rewards = {
            number: build_reward(settings, config)
            for number, config in enumerate(settings.parts)
            if are_async[number] == run_async
        }
    except UserError as error:
        replies.send(reply_packet(START_ID, {"user_error": str(error)}))
        return 2
    replies.send(reply_packet(START_ID, {"asynchronous": are_async}))
    if run_async:
        asyncio.run(_serve_async(rewards, requests, replies))
    else:
        _serve_blocking(rewards, requests, replies)
    return 0


def _log_file(settings: ScorerSettings) -> Path | None:
    """Return the log file of all scorer processes of this host; None if there is no log folder."""
    name = f"scorer-{socket.gethostname()}.log"
    return Path(settings.logs) / name if settings.logs else None


def _serve_blocking(rewards: dict[int, Reward], requests: BinaryIO, replies: _Replies) -> None:
    """Score requests by blocking rewards, one request after the other, until the worker closes the
    pipe `requests`."""
    while (request := parse_request(requests.readline())) is not None:
        name, wanted = request["id"], request["wanted"]
        reward = rewards[wanted["part"]]
        try:
            packet = reply_packet(name, _content(reward.score(_samples(wanted))))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - scorers raise anything
            packet = reply_packet(name, replies.error(reward, error))
        replies.send(packet)


async def _serve_async(rewards: dict[int, Reward], requests: BinaryIO, replies: _Replies) -> None:
    """Score requests by asynchronous rewards, all concurrently, until the pipe of requests ends.

    A message with only the `id` of a request cancels that request.
    """
    running: dict[str, asyncio.Task[None]] = {}

    async def score(name: str, wanted: dict[str, Any]) -> None:
        """Score the decoded job `wanted`; reply to its request, whose ID is `name`."""
        reward = rewards[wanted["part"]]
        try:
            packet = reply_packet(name, _content(await reward.score_async(_samples(wanted))))
        except asyncio.CancelledError:
            packet = reply_packet(name, {"error": "canceled"})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - scorers raise anything
            packet = reply_packet(name, replies.error(reward, error))
        replies.send(packet)
        del running[name]

    reader = asyncio.StreamReader(limit=sys.maxsize // 2)  # Requests have no size limit.
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), requests
    )
    while (request := parse_request(await reader.readline())) is not None:
        name = request["id"]
        if "wanted" in request:
            running[name] = asyncio.create_task(score(name, request["wanted"]))
        elif name in running:  # The worker cancels this request, because it took too long.
            running[name].cancel()


def _samples(wanted: dict[str, Any]) -> list[Sample]:
    """Return the arguments of the reward function for a decoded job: one `Sample` per response."""
    texts = enumerate(wanted["texts"])
    return [sample_of(wanted["payload"], text, index) for index, text in texts]


def _content(scores: list[RewardScore]) -> dict[str, Any]:
    """Return the content of the reply packet that reports `scores`."""
    return {"scores": [[score.value, dict(score.parts)] for score in scores]}


def _run_scorer(
    settings: ScorerSettings, run_async: bool, requests: int, channel: socket.socket, output: int
) -> int:
    """Set up the forked scorer process, then score requests until the worker closes their pipe.

    The setup consists of four steps:

    - The kernel is told to kill this process when its parent, the keeper, ends.
    - Standard output and standard error are redirected to the pipe `output`.
    - The memory of this process is limited.
    - In every process that a reward function forks, the pipe of requests is replaced by
      `/dev/null`, so that only this process can read requests.

    Returns:
        The exit code of the scorer process: 1 if the keeper ended during the first step, otherwise
        the result of `serve`.
    """
    keeper = os.getppid()
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        return 1
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    limit, most = settings.scoring.memory_mib << 20, resource.getrlimit(resource.RLIMIT_AS)[1]
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    # Set only the soft limit, because the sandbox must be able to raise it for a program.
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.register_at_fork(after_in_child=partial(os.dup2, nothing, requests, False))
    with os.fdopen(requests, "rb") as stream:
        return serve(settings, run_async, stream, channel)


class _Output:
    """Reads what a scorer process prints: logs the first part, keeps the end for error messages.

    Attributes:
        source: Descriptor of the pipe with the output.
        tail: The last `_TAIL_BYTES` of the output.
    """

    def __init__(self, source: int) -> None:
        self.source = source
        self.tail = b""
        self._log_budget = _LOG_BYTES

    def pump(self) -> bool:
        """Read one piece of the scorer's output, and log it unless the log's limit is reached.

        Returns:
            Whether there was output; False if the pipe is empty or closed.
        """
        try:
            piece = os.read(self.source, _PIECE_BYTES)
        except BlockingIOError:
            return False
        self.tail = (self.tail + piece)[-_TAIL_BYTES:]
        if self._log_budget and piece:
            self._log(piece[: self._log_budget])
            self._log_budget -= min(self._log_budget, len(piece))
            if not self._log_budget:
                self._log(b"\n[scorer process printed more than 16 KiB; the rest is not logged]\n")
        return bool(piece)

    @staticmethod
    def _log(piece: bytes) -> None:
        """Write `piece` to standard error, or drop it if writing would block this process."""
        with suppress(OSError):
            if select.select([], [2], [], 0)[1]:
                os.write(2, piece)


def _supervise(scorer: int, requests: int, output: _Output) -> int | None:
    """Log a scorer's output until the scorer ends or its worker closes the pipe of requests.

    Args:
        scorer: Process ID of the scorer process.
        requests: Descriptor of the pipe of requests, to notice that the worker closes the pipe.
        output: The scorer's output.

    Returns:
        The scorer's exit code; None if the worker closed the pipe before the scorer ended.
    """
    poll = select.poll()
    poll.register(requests, 0)
    poll.register(output.source, select.POLLIN)
    poll.register(os.pidfd_open(scorer), select.POLLIN)
    while True:
        ready = dict(poll.poll(_REAP_MILLISECONDS))
        if output.source in ready and not output.pump():
            poll.unregister(output.source)
        code = _reap(scorer)
        if code is not None or requests in ready:
            return code


def _reap(scorer: int) -> int | None:
    """Reap all child processes that have ended; return the scorer's exit code if it is among them.

    `scorer` is the process ID of the scorer process. The result is None if it has not ended.
    """
    code = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == scorer:
                code = os.waitstatus_to_exitcode(status)
    return code


def _end_descendants() -> None:
    """Kill and reap all descendants of this process, for at most `_END_SECONDS`.

    The search is repeated until no child is left, since descendants may start further processes
    during the search. Children of a killed process become children of this process.
    """
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def main(settings_json: str, kind: str) -> int:
    """Run as the keeper: fork a scorer process, watch it, and clean up after it.

    The keeper waits until the scorer process ends or the worker closes the pipe of requests. Then
    it kills all processes that remain, and reports the end to the worker. When the keeper starts,
    its standard input is the pipe of requests and its standard output is the socket for replies.

    Args:
        settings_json: The `ScorerSettings` as JSON.
        kind: `BLOCKING` or `ASYNC`: which of the rewards the scorer process runs.

    Returns:
        An exit code. The function returns in both processes: 0 in the keeper, and the result of
        `_run_scorer` in the forked scorer process.
    """
    high = min(_HIGH_DESCRIPTOR, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 16)
    requests = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, high)
    channel = socket.socket(fileno=fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, high))
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    settings = ScorerSettings.model_validate_json(settings_json)
    if (log := _log_file(settings)) is not None:
        with suppress(OSError):  # Scoring continues even if the log cannot be opened.
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), 2)
    os.dup2(2, 1)
    prctl(SUBREAPER, 1)
    source, output = os.pipe()
    scorer = os.fork()
    if scorer == 0:
        os.close(source)
        return _run_scorer(settings, kind == ASYNC, requests, channel, output)
    os.close(output)
    printed = _Output(source)
    code = _supervise(scorer, requests, printed)
    _end_descendants()
    os.set_blocking(source, False)
    while printed.pump():
        pass
    # Limit the time of sending. The queue of the socket may be full of packets that a reward
    # function wrote, so that sending would block.
    channel.settimeout(1.0)
    with suppress(OSError):
        tail = printed.tail.decode(errors="replace").strip()
        _Replies(channel).send(reply_packet(END_ID, {"exit_code": code, "output": tail}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

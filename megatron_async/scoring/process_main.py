"""The process that runs a scorer, and the keeper above it that ends what the scorer leaves behind.

    worker ── requests (pipe) ─┬─▶ scorer ── replies (packets) ─┬─▶ worker
                               └ hang-up ─▶ keeper ── its end ──┘

The worker starts the keeper; the keeper forks the scorer and adopts all its orphans (Linux
"child subreaper"), also those that began a session of their own.

Invariants
- It imports neither torch nor transformers.
- When the worker closes the requests or dies, and when the scorer ends, the keeper kills all that
  the scorer started, then ends itself. The scorer ends with the keeper.
- Nothing but the harness has the two channels: their descriptors are high and closed on exec,
  standard input is empty, standard output and error go to the log through the keeper, at most
  `_LOG_BYTES` of them. Why a score failed is in the log whatever else is printed.
- A copy of the scorer process that scorer code forks off neither reads requests nor replies.
- Rewards and their parts are finite numbers; anything else is an error of the scorer.
- Blocking rewards are scored one response after the other, asynchronous ones all at once; a process
  does the one or the other.
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
    END_ID,
    START_ID,
    WAITING,
    parse_request,
    reply_packet,
)
from megatron_async.scoring.rewards.reward import Reward, asynchronous, build_reward
from megatron_async.scoring.rewards.sample import RewardScore, Sample, Unavailable, sample_of

_HIGH_DESCRIPTOR = 1000
_LOG_BYTES = 16 << 10
_LARGEST_LOG_BYTES = 1 << 20
_TAIL_BYTES = 2000
_PIECE_BYTES = 4096  # a pipe that is ready takes so much without waiting
_REAP_MILLISECONDS = 1000.0
_END_SECONDS = 60.0  # on a busy machine one look at all processes takes a second
_ERROR_CHARACTERS = 500


class _Replies:
    """Sends packets as the process that made it; a forked copy of that process ends instead."""

    def __init__(self, channel: socket.socket, log: Path | None = None) -> None:
        """`log` gets the tracebacks of rewards; None: standard error gets a line for each."""
        self._channel = channel
        self._pid = os.getpid()
        self._log = log

    def send(self, packet: bytes) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        self._channel.send(packet)

    def error(self, reward: Reward, error: BaseException) -> dict[str, Any]:
        """Log an exception of the reward; the content of the reply to its score."""
        what = reward.described(error)
        line = f"reward {reward.display_name} failed: {what}\n"
        if self._log is None:
            print(line, end="", file=sys.stderr)
        else:  # past the keeper, which stops where a reward prints too much
            with (
                suppress(OSError),
                self._log.open("a", 1 << 20, "utf-8", "backslashreplace") as file,
            ):
                text = line + "".join(format_exception(error))
                file.write(text[: max(0, _LARGEST_LOG_BYTES - file.tell())])
        kind = {"unavailable": True} if isinstance(error, Unavailable) else {}
        return {"error": what[:_ERROR_CHARACTERS], **kind}


def serve(settings: ScorerSettings, waits: bool, requests: BinaryIO, channel: socket.socket) -> int:
    """Score until `requests` ends, by the asynchronous rewards (`waits`) or by the others.

    Exit code 2 when the settings are refused.
    """
    replies = _Replies(channel, _log_file(settings))
    try:
        waiting = [asynchronous(part) for part in settings.parts]
        rewards = {
            number: build_reward(settings, part)
            for number, part in enumerate(settings.parts)
            if waiting[number] == waits
        }
    except UserError as error:
        replies.send(reply_packet(START_ID, {"user_error": str(error)}))
        return 2
    replies.send(reply_packet(START_ID, {"asynchronous": waiting}))
    if waits:
        asyncio.run(_serve_waiting(rewards, requests, replies))
    else:
        _serve_blocking(rewards, requests, replies)
    return 0


def _log_file(settings: ScorerSettings) -> Path | None:
    """The log of all scorers of this host; None: standard error."""
    name = f"scorer-{socket.gethostname()}.log"
    return Path(settings.logs) / name if settings.logs else None


def _serve_blocking(rewards: dict[int, Reward], requests: BinaryIO, replies: _Replies) -> None:
    """Score one request after the other."""
    while (request := parse_request(requests.readline())) is not None:
        name, wanted = request["id"], request["wanted"]
        reward = rewards[wanted["part"]]
        try:
            packet = reply_packet(name, _content(reward.score(_samples(wanted))))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - scorers raise anything
            packet = reply_packet(name, replies.error(reward, error))
        replies.send(packet)


async def _serve_waiting(rewards: dict[int, Reward], requests: BinaryIO, replies: _Replies) -> None:
    """Score all requests at once, in one event loop."""
    running: dict[str, asyncio.Task[None]] = {}

    async def score(name: str, wanted: dict[str, Any]) -> None:
        reward = rewards[wanted["part"]]
        try:
            packet = reply_packet(name, _content(await reward.score_async(_samples(wanted))))
        except asyncio.CancelledError:
            packet = reply_packet(name, {"error": "canceled"})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - scorers raise anything
            packet = reply_packet(name, replies.error(reward, error))
        replies.send(packet)
        del running[name]

    reader = asyncio.StreamReader(limit=sys.maxsize // 2)  # a request is of any size
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), requests
    )
    while (request := parse_request(await reader.readline())) is not None:
        name = request["id"]
        if "wanted" in request:
            running[name] = asyncio.create_task(score(name, request["wanted"]))
        elif name in running:  # it took too long
            running[name].cancel()


def _samples(wanted: dict[str, Any]) -> list[Sample]:
    texts = enumerate(wanted["texts"])
    return [sample_of(wanted["payload"], text, place) for place, text in texts]


def _content(scores: list[RewardScore]) -> dict[str, Any]:
    return {"scores": [[score.value, dict(score.parts)] for score in scores]}


def _run_scorer(
    settings: ScorerSettings, waits: bool, requests: int, channel: socket.socket, output: int
) -> int:
    """Run the scorer in the forked process."""
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
    # The soft limit only: a program in the sandbox has limits of its own.
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.register_at_fork(after_in_child=partial(os.dup2, nothing, requests, False))
    with os.fdopen(requests, "rb") as stream:
        return serve(settings, waits, stream, channel)


class _Output:
    """Output of the scorer: the beginning goes to the log, the end is kept for an error."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.tail = b""
        self._left = _LOG_BYTES

    def pump(self) -> bool:
        """Pass one piece on; false when there is none."""
        try:
            piece = os.read(self.source, _PIECE_BYTES)
        except BlockingIOError:
            return False
        self.tail = (self.tail + piece)[-_TAIL_BYTES:]
        if self._left and piece:
            self._log(piece[: self._left])
            self._left -= min(self._left, len(piece))
            if not self._left:
                self._log(b"\n[a scorer process prints more than this log takes]\n")
        return bool(piece)

    @staticmethod
    def _log(piece: bytes) -> None:
        """Log to standard error, unless its reader is behind: nothing here may wait for a log."""
        with suppress(OSError):
            if select.select([], [2], [], 0)[1]:
                os.write(2, piece)


def _supervise(scorer: int, requests: int, output: _Output) -> int | None:
    """Wait until the scorer ends or the worker hangs up. The scorer's exit code, if it ended."""
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
    """Bury all children that have ended. The scorer's exit code, if it is one of them."""
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
    """Kill until no child is left; orphans become children of this process and come next."""
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
    """Keeper and scorer. Standard input is the pipe of requests, standard output the socket."""
    high = min(_HIGH_DESCRIPTOR, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 16)
    requests = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, high)
    channel = socket.socket(fileno=fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, high))
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    settings = ScorerSettings.model_validate_json(settings_json)
    if (log := _log_file(settings)) is not None:
        with suppress(OSError):  # a score is worth more than its log
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), 2)
    os.dup2(2, 1)
    prctl(SUBREAPER, 1)
    source, output = os.pipe()
    scorer = os.fork()
    if scorer == 0:
        os.close(source)
        return _run_scorer(settings, kind == WAITING, requests, channel, output)
    os.close(output)
    printed = _Output(source)
    code = _supervise(scorer, requests, printed)
    _end_descendants()
    os.set_blocking(source, False)
    while printed.pump():
        pass
    channel.settimeout(1.0)  # a queue full of stray packets
    with suppress(OSError):
        tail = printed.tail.decode(errors="replace").strip()
        _Replies(channel).send(reply_packet(END_ID, {"exit_code": code, "output": tail}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Makes the reward in a scorer process misbehave after each score.

The environment variable `HOSTILE_SCORER` names the behavior, a function of this module. With this
folder on PYTHONPATH every Python process imports this module at its start, but it acts only in
scorer processes. So the tests start the package's own code, unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


def _sockets() -> Iterator[int]:
    """Yield the descriptors of this process that are sockets; one of them is the reply socket."""
    for fd in range(3, 1100):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield fd


def _write_everywhere(data: bytes, descriptors: Any = range(3, 31)) -> None:
    """Write `data` to each of the descriptors that is open for writing."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.write(fd, data)


def _reply_id() -> str:
    """Return the `id` of the pending reply, read from the stack frames of `process_main`."""
    frame = sys._getframe()
    while "request" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return str(frame.f_locals["name"])


def fork_and_return(score: Any) -> Any:
    os.fork()
    return score


def fork_and_raise(score: Any) -> Any:
    if os.fork() == 0:
        raise RuntimeError("raised in a forked copy")
    return score


def fork_and_forge(score: Any) -> Any:
    """Let a forked copy send a forged reply before the scorer replies."""
    name = _reply_id()
    pid = os.fork()
    if pid == 0:
        reply = {"id": name, "scores": [[9.0, {}]]}
        _write_everywhere(json.dumps(reply).encode(), _sockets())
        os._exit(0)
    os.waitpid(pid, 0)
    return score


def garbage(score: Any) -> Any:
    _write_everywhere(b"garbage\n")
    return score


def garbage_in_the_channel(score: Any) -> Any:
    for data in (b"garbage\n", b"", b"[1]", b"[" * 9999, b'{"reward": 9.0, "detail": {}}\n'):
        _write_everywhere(data, _sockets())
    return score


def flood(score: Any) -> Any:
    descriptors = list(_sockets())
    while True:
        _write_everywhere(b"garbage\n", descriptors)


def flood_from_a_thread(score: Any) -> Any:
    if threading.active_count() == 1:
        threading.Thread(target=flood, args=(score,), daemon=True).start()
    time.sleep(0.05)  # The thread must write before the reply.
    return score


def printed(score: Any) -> Any:
    print("x" * 3_000_000)
    os.write(1, b'{"reward": 9.0, "detail": {}}\n')
    os.write(2, b"y" * 100_000)
    return score


def read_input(score: Any) -> Any:
    assert sys.stdin.read() == ""
    return score


def leave_children(score: Any) -> Any:
    """Leave a sleeping child, and an orphaned grandchild in a separate session."""
    if os.fork() == 0:
        time.sleep(600)
    between = os.fork()
    if between == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.waitpid(between, 0)
    return score


def leave_children_and_hang(score: Any) -> Any:
    leave_children(score)
    time.sleep(600)


def leave_children_and_die(score: Any) -> Any:
    leave_children(score)
    os._exit(3)


def interrupted_reply(score: Any) -> Any:
    """Raise an exception just after the reply has been sent, like a forgotten signal handler."""

    def interrupt(frame: Any, event: str, function: Any) -> None:
        if event == "c_return" and function.__name__ == "send":
            sys.setprofile(None)
            raise TimeoutError("an alarm of the scorer's")

    sys.setprofile(interrupt)
    return score


def nan(score: Any) -> Any:
    return float("nan"), {}


def infinite(score: Any) -> Any:
    return float("-inf"), {}


def nan_part(score: Any) -> Any:
    return score[0], {**score[1], "part": float("nan")}


def beyond_float32(score: Any) -> Any:
    return 1e39, score[1]


def huge_number(score: Any) -> Any:
    return 10**400, score[1]


def huge_reply(score: Any) -> Any:
    return score[0], {f"part {n}": float(n) for n in range(10_000)}


def text_for_a_reward(score: Any) -> Any:
    return "full marks", score[1]


def nothing(score: Any) -> Any:
    return None


def stop_the_parent(score: Any) -> Any:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)


def stop_the_parent_for_ever(score: Any) -> Any:
    while True:
        os.kill(os.getppid(), signal.SIGSTOP)


def exit_at_once(score: Any) -> Any:
    sys.exit(1)


def endless_recursion(score: Any) -> Any:
    return endless_recursion(score)


def _misbehave(behavior: Callable[[Any], Any]) -> None:
    """Pass each score of the reward `task` in this process through `behavior`."""
    from megatron_async.scoring.rewards.compare import TaskReward

    build_scorer = TaskReward.build_scorer

    def build_hostile_scorer(self: TaskReward, *arguments: Any) -> Any:
        score = build_scorer(self, *arguments)
        return lambda sample: behavior(score(sample))

    TaskReward.build_scorer = build_hostile_scorer


if "HOSTILE_SCORER" in os.environ and "megatron_async.scoring.process_main" in sys.orig_argv:
    _misbehave(globals()[os.environ["HOSTILE_SCORER"]])

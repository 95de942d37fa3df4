"""Makes the scorer of a scorer process misbehave as `HOSTILE_SCORER` names, once it has its score.

With this folder on PYTHONPATH it is imported by every Python process at its start, and acts in the
scorer process only: what the tests start is the package's own code, unchanged.
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
    """Descriptors of this process that are sockets: the reply channel is one of them."""
    for fd in range(3, 1100):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield fd


def _write_everywhere(data: bytes, descriptors: Any = range(3, 31)) -> None:
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.write(fd, data)


def _reply_id() -> str:
    """The id of the reply that is due, dug out of the frames of the harness."""
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
    """A forked copy replies first, as the scorer would have."""
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
    time.sleep(0.05)  # lets the thread write
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
    """One child, and one grandchild in a session of its own, whose parents have ended."""
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
    """A signal handler that a scorer forgot raises just when its reply has been sent."""

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
    from megatron_async.scoring.rewards.compare import TaskReward

    build_scorer = TaskReward.build_scorer

    def bound_hostile(self: TaskReward, *arguments: Any) -> Any:
        score = build_scorer(self, *arguments)
        return lambda sample: behavior(score(sample))

    TaskReward.build_scorer = bound_hostile


if "HOSTILE_SCORER" in os.environ and "megatron_async.scoring.process_main" in sys.orig_argv:
    _misbehave(globals()[os.environ["HOSTILE_SCORER"]])

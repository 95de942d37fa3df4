"""Runs one remote object of the local backend. This module is the program of the object's process.

It is started as `-m megatron_async.process_backends.host NAME SOCKET`. Standard input has the
pickled class and its arguments. `SOCKET` is the descriptor of the listening socket, over which
calls arrive. The process that starts this one creates the socket, so calls can wait in it before
this process runs.
"""

import asyncio
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable

from megatron_async.process_backends.child_process import hold_lifeline
from megatron_async.process_backends.remote_object import HostedObject
from megatron_async.process_backends.sockets import serve
from megatron_async.runtime.garbage_collection import gc_disabled


async def _serve(listening: socket.socket) -> None:
    """Build the object from standard input, and serve calls to it on the socket forever."""
    # Unpickling the class imports its module and everything that the module imports. Garbage
    # collection would slow down these imports and find hardly anything.
    with gc_disabled(frozen=True):
        what, arguments = pickle.load(sys.stdin.buffer)
    remote = HostedObject(what, *arguments)
    await serve(listening, remote.handle)


def new_loops() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the function that creates uvloop's event loops; None if uvloop is not installed.

    SGLang and Ray install uvloop. It is preferred because asyncio's own loop has a defect that
    user programs can trigger. If a program drops an HTTP client without closing it, the loop may
    stop listening to a newer connection that has got the same descriptor number.
    """
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def main(socket_number: int) -> None:
    """Serve calls to the object on the listening socket `socket_number` until killed."""
    hold_lifeline()
    # SIGUSR2 requests that trainers stop. This process and its children, which inherit the setting,
    # ignore it, because by default the signal would kill them.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    os.set_inheritable(socket_number, False)
    with asyncio.Runner(loop_factory=new_loops()) as runner:
        runner.run(_serve(socket.socket(fileno=socket_number)))


if __name__ == "__main__":
    main(int(sys.argv[2]))

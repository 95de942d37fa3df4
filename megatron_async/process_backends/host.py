"""The process of an object of the local backend.

Started as `-m megatron_async.process_backends.host NAME SOCKET`.

Standard input holds the pickled class and its arguments. Calls come over the listening socket with
this number, which whoever started the process has made: they can be there before the process is.
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
    with gc_disabled(frozen=True):  # finding the class imports all that it needs
        what, arguments = pickle.load(sys.stdin.buffer)
    remote = HostedObject(what, *arguments)
    await serve(listening, remote.handle)


def new_loops() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed, as it is with SGLang and with Ray.

    An HTTP client that a user's program drops unclosed may make asyncio's own loop stop listening
    to another connection: its end comes when the number of its descriptor is another's.
    """
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def main(socket_number: int) -> None:
    """Serve until killed."""
    hold_lifeline()
    # It asks trainers to stop, and nobody may die of it; what is started here inherits that.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    os.set_inheritable(socket_number, False)
    with asyncio.Runner(loop_factory=new_loops()) as runner:
        runner.run(_serve(socket.socket(fileno=socket_number)))


if __name__ == "__main__":
    main(int(sys.argv[2]))

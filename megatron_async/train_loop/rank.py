"""Entry point of one trainer rank under torchrun: `-m megatron_async.train_loop.rank RUN_DIR`.

The launcher sets the environment variable `MEGATRON_ASYNC_BACKEND` to the address of the process
backend that runs the rollout manager. For the launcher, the rank writes to the run directory how
the run has ended: it is complete, it was stopped on request (by SIGUSR2 or a file, see
`train_loop/stop.py`), or it has failed with a message.
"""

import os
import sys

from megatron_async.config import RunConfig
from megatron_async.process_backends.child_process import follow_parent
from megatron_async.run_directory import RunDirectory
from megatron_async.runtime.garbage_collection import gc_disabled
from megatron_async.train_loop.attempt import begin_attempt, exit_code, leave
from megatron_async.train_loop.stop import StopRequest

# Environment variable in which the launcher passes the address of the process backend, by which it
# has started the rollout manager, to the ranks.
BACKEND_VARIABLE = "MEGATRON_ASYNC_BACKEND"


def train(
    directory: RunDirectory, config: RunConfig, backend_address: str, stop: StopRequest
) -> None:
    """Run one trainer rank from the newest checkpoint to the export of the model."""
    cause = begin_attempt(directory)
    with gc_disabled(frozen=True):
        from megatron_async.trainer.device import import_megatron

        import_megatron()
        from megatron_async.train_loop import assembly

    assembly.train(directory, config, backend_address, stop, cause)


def main(arguments: list[str]) -> int:
    """Run the rank for the run directory in `arguments` and return its exit code: 0, 1 if a
    component failed, 2 for bad input."""
    follow_parent()
    stop = StopRequest.from_environment()
    directory, config = RunDirectory.launched(arguments[0])
    address = os.environ[BACKEND_VARIABLE]
    return exit_code(directory, lambda: train(directory, config, address, stop))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

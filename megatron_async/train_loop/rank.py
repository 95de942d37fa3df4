"""Entry of one trainer rank under torchrun: `-m megatron_async.train_loop.rank RUN_DIR`.

Where the rollout side is comes from the environment (`MEGATRON_ASYNC_BACKEND`), set by whoever
started both. A failure with a sentence is left in the run directory for the supervisor, and so is
how the run ended: complete, or stopped because it was asked to (SIGUSR2, see `train_loop/stop.py`).
"""

import os
import sys

from megatron_async.config import RunConfig
from megatron_async.process_backends.child_process import follow_parent
from megatron_async.run_directory import RunDirectory
from megatron_async.runtime.garbage_collection import gc_disabled
from megatron_async.train_loop.attempt import begin_attempt, exit_code, leave
from megatron_async.train_loop.stop import StopRequest

# Set by whoever starts both sides.
BACKEND_VARIABLE = "MEGATRON_ASYNC_BACKEND"


def train(
    directory: RunDirectory, config: RunConfig, backend_address: str, stop: StopRequest
) -> None:
    """Run one rank, from the newest checkpoint to the export."""
    cause = begin_attempt(directory)
    with gc_disabled(frozen=True):
        from megatron_async.trainer.device import import_megatron

        import_megatron()
        from megatron_async.train_loop import assembly

    assembly.train(directory, config, backend_address, stop, cause)


def main(arguments: list[str]) -> int:
    """Exit code of one rank (`train_loop/attempt.py`)."""
    follow_parent()
    stop = StopRequest.from_environment()
    directory, config = RunDirectory.launched(arguments[0])
    address = os.environ[BACKEND_VARIABLE]
    return exit_code(directory, lambda: train(directory, config, address, stop))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

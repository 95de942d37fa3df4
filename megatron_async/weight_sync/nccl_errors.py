"""Provides the error handling of the NCCL groups over which weights are sent, for the trainer and
for engines.

By default torch starts a watchdog thread for each NCCL group. When a collective fails, the watchdog
ends the process. It also signals the monitor thread of the process's first NCCL group, which ends
the process eight minutes later, whatever error handling is set for the failed group. A weight group
must not do that: if one engine dies, the trainer and the other engines continue.

Invariants
- A weight group has no watchdog. Its errors are raised where the caller waits for a broadcast:
  `wait` blocks until the broadcast has ended, and raises RuntimeError if it has failed.
- All other groups of the process keep torch's own error handling.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# With TORCH_NCCL_BLOCKING_WAIT torch starts no watchdog. The error handling 2 alone, with which a
# watchdog does not end the process, would not suffice: the watchdog would still signal the monitor
# thread.
WEIGHT_GROUP_VARIABLES: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
}


@contextmanager
def errors_raised_by_wait() -> Iterator[None]:
    """Give the NCCL groups that are constructed in this block the error handling of weight groups.

    torch reads the environment variables when a group is constructed, so they are set only in this
    block and then restored.
    """
    before = {name: os.environ.get(name) for name in WEIGHT_GROUP_VARIABLES}
    os.environ.update(WEIGHT_GROUP_VARIABLES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

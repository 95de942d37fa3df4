"""Error handling of the NCCL groups that carry weights, on the trainer's and the engines' side.

By default torch starts a watchdog thread for each NCCL group. When a collective fails, the watchdog
ends the process. It also signals the monitor thread of the process's first group, which ends the
process eight minutes later, whatever the failed group's error handling is. A weight group must not
do that: if one engine dies, the trainer and the other engines continue.

Invariants
- A weight group has no watchdog. Its errors are found where its caller waits: `wait` blocks until
  the broadcast has ended, and raises RuntimeError if it has failed.
- All other groups of the process keep torch's own error handling.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# With blocking waits torch starts no watchdog. Error handling 2, which cleans up without ending the
# process, would not suffice, because its watchdog signals the monitor all the same.
WEIGHT_GROUP_VARIABLES: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
}


@contextmanager
def errors_raised_by_wait() -> Iterator[None]:
    """Give the NCCL groups that are constructed in this block the error handling of weight groups.

    torch reads the variables in a group's constructor, so those of the process are restored after.
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

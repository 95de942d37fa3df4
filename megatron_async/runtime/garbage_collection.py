"""Python's search for garbage in cycles, in processes that hold thousands of streams.

A full search looks at every object that lives, at once: with 4,096 requests in flight it held the
event loop for 50 ms each time that they were submitted again, and found nothing. What is in a
cycle there is young, and the searches of the young find it.
"""

import gc

_FULL_SEARCH_EVERY = 1_000
"""Searches of the middle generation, some thousand objects each; Python's own is 10."""


def search_rarely() -> None:
    """Freeze existing objects; collect fully 100 times less often."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_SEARCH_EVERY)

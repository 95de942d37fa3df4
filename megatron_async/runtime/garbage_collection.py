"""Python's search for garbage in cycles: where it takes time and finds nothing.

A full search looks at every object that lives, at once. With 4,096 requests in flight it held the
event loop for 50 ms each time that they were submitted again; while SGLang is imported, searches
are a fifth of the time. What is in a cycle is young, and the searches of the young find it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FULL_SEARCH_EVERY = 1_000
"""Searches of the middle generation, some thousand objects each; Python's own is 10."""


def tune_gc() -> None:
    """Freeze existing objects; collect fully 100 times less often."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_SEARCH_EVERY)


@contextmanager
def gc_disabled(*, frozen: bool = False) -> Iterator[None]:
    """Around imports, whose modules live on.

    `frozen`: what exists at the end is never searched, for a process that is ours alone.
    """
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
        if searched:
            gc.enable()

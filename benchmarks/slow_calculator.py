"""The calculator of the examples with replies that take a while: a tool's workload."""

from __future__ import annotations

import time


class SlowCalculator:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def reset(self, **row: object) -> None:
        time.sleep(self._seconds)

    def multiply(self, a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first.
            b: The second.
        """
        time.sleep(self._seconds)
        return a * b

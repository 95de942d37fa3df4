"""Provides an environment that misbehaves in its second turn, as the row's column `how` names.

Without `how`, the seed chooses it. The folder `marker` records misbehavior that happens only once.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from megatron_async.environments import Answer, Step

BY_SEED = ("well", "exit", "hang", "hang_async", "raise", "memory", "stdout", "fork", "close")
BLOCKED_SECONDS = 3600


class Text(str):
    """A text whose class can be imported only in the worker."""


class Villain:
    def __init__(self, marker: str = ".") -> None:
        self._marker = Path(marker)

    def reset(self, seed: int = 0, how: str = "", **row: Any) -> str:
        self.how, self.seen = how or BY_SEED[seed % len(BY_SEED)], 0
        if self.how == "slow_start":
            time.sleep(0.8)
        return f"{self.how} {seed}"

    def step(self, answer: Answer) -> Step | Awaitable[Step]:
        self.seen += 1
        if self.seen == 2:
            if self.how in ("hang_async", "deaf_async", "block"):
                return self._in_the_loop()
            odd = self._misbehave()
            if odd is not None:
                return odd  # type: ignore[no-any-return]
        return self._well()

    def _well(self) -> Step:
        return Step("go on" if self.seen < 3 else "", 1.0, self.seen == 3)

    async def _in_the_loop(self) -> Step:
        while self.how != "block":
            try:
                await asyncio.sleep(BLOCKED_SECONDS)
            except asyncio.CancelledError:
                if self.how == "hang_async":
                    raise
        if self._first():
            time.sleep(BLOCKED_SECONDS)
        return self._well()

    def _first(self) -> bool:
        """Return whether the misbehavior happens for the first time, and record it."""
        try:
            (self._marker / self.how).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _misbehave(self) -> Any:
        match self.how:
            case "exit":
                os._exit(3)
            case "exit_once" if self._first():
                os._exit(3)
            case "sys_exit":
                sys.exit("enough")
            case "hang":
                time.sleep(BLOCKED_SECONDS)
            case "greedy" if self._first():
                re.match(r"(a+)+$", "a" * 64 + "b")  # Keeps the GIL, so no other thread runs.
            case "raise":
                raise ValueError("no such move")
            case "slow":
                time.sleep(0.7)
            case "memory":
                bytearray(1 << 40)
            case "stdout" if self._first():  # Only once: the descriptors are reused later.
                sys.stdout.close()
                sys.stderr.close()
                os.close(1)
                os.close(2)
            case "fork":
                if not os.fork():
                    time.sleep(BLOCKED_SECONDS)
            case "child":
                child = subprocess.Popen(["sleep", str(BLOCKED_SECONDS)])
                (self._marker / "pid").write_text(str(child.pid))
            case "own_text":
                return Step([{"role": "user", "content": Text("x")}])
        return None

    def get_reward(self) -> float:
        return 0.0

    def state(self) -> bytes:
        return f"{self.how} {self.seen}".encode()

    def restore(self, state: bytes, **row: Any) -> None:
        self.how, seen = state.decode().split()
        self.seen = int(seen)

    def close(self) -> None:
        if self.how == "close":
            raise OSError("it is locked")
        if self.how == "slow_start":
            (self._marker / "closed").touch()

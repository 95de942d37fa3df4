"""Provides an environment that writes every call it receives to disk before it continues.

Its file is the record of what the environment received. Each call is one JSON line, which one
`write` call appends and which is on disk before the environment handles the call. Each episode
draws a name at its reset. The name is in the first message to the policy and in the episode's
snapshots:

    {"what": "step", "name": "5f0c...", "seed": 17, "turn": 2, "text": "abc"}
"""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from pathlib import Path
from typing import Any

from megatron_async.environments import Answer, Step
from tests.crash.hostile_reward import take

_TOOL_SECONDS = 0.02
_TURNS = (3, 8)
OPENING = "episode "


def note(ledger: str, **line: Any) -> None:
    """Append `line` as JSON to the file `ledger`, and wait until it is on disk."""
    Path(ledger).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


class Noted:
    """Environment whose number of turns follows from the seed, and which notes its calls."""

    def __init__(self, ledger: str) -> None:
        self._ledger = ledger

    def _note(self, what: str, **more: Any) -> None:
        note(self._ledger, what=what, name=self.name, seed=self.seed, **more)

    def reset(self, seed: int, **row: Any) -> str:
        self.name, self.seed, self.seen = uuid.uuid4().hex[:12], seed, 0
        self._note("reset")
        return f"{OPENING}{self.name}"

    def step(self, answer: Answer) -> Step:
        self._note("step", turn=answer.turn, text=answer.text)
        time.sleep(_TOOL_SECONDS)
        if answer.turn != self.seen:
            raise ValueError(f"turn {answer.turn} came after {self.seen} turns")
        self.seen += 1
        odd = _misbehaved(take())
        if odd is not None:
            return odd  # type: ignore[no-any-return]
        done = self.seen == random.Random(self.seed).randint(*_TURNS)
        return Step("" if done else f"{self.seen}", len(answer.text) % 3 / 4, done)

    def state(self) -> bytes:
        return json.dumps([self.name, self.seed, self.seen]).encode()

    def restore(self, state: bytes, **row: Any) -> None:
        self.name, self.seed, self.seen = json.loads(state)
        self._note("restore", turn=self.seen)


async def _block() -> Step:
    time.sleep(3600)
    return Step()


def _misbehaved(kind: str) -> Any:
    """Obey the command `kind`.

    Returns:
        The result that `step` must return, or None if `step` must return its usual result.
    """
    match kind:
        case "environment raises":
            raise ValueError("no such move")
        case "environment hangs":
            time.sleep(3600)
        case "environment returns the wrong type":
            return "higher"
        case "environment floods":
            return Step("x" * ((1 << 20) + 1))
        case "environment eats memory":
            bytearray(1 << 40)
        case "environment forks":
            if not os.fork():
                time.sleep(3600)
        case "environment blocks its loop":
            return _block()
        case "environment dies":
            os._exit(3)
    return None

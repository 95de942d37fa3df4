"""A reward that fails on command (`reward: .../hostile_reward.py:score`).

`HOSTILE_FILE` names a file: whoever scores next and finds it takes it away and behaves as it asks,
once. A reward follows from the text alone (`reward_of`), so that one which belongs to another
response shows.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from pathlib import Path
from typing import Any

COMMAND_VARIABLE = "HOSTILE_FILE"
IMPORT_PATH = f"{Path(__file__).resolve()}:score"


def reward_of(text: str) -> float:
    """In (0, 1]: 0 is what a failed score gets."""
    return (1 + zlib.crc32(text.encode()) % 8) / 8


def take() -> str:
    """The command that there is, for whoever takes it; "" without one."""
    command = Path(os.environ.get(COMMAND_VARIABLE, os.devnull + ".none"))
    taken = command.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        command.rename(taken)
    except FileNotFoundError:
        return ""
    kind = taken.read_text()
    taken.unlink()
    return kind


def score(sample: Any) -> float:
    """The reward of a response, unless there is a command."""
    kind = take()
    if kind:
        _misbehave(kind)
    return reward_of(sample.response)


def _misbehave(kind: str) -> None:
    if kind == "scorer hangs":
        time.sleep(3600)
    elif kind == "scorer floods its output":
        print("x" * 3_000_000)
    elif kind == "scorer forks":
        for _ in range(4):
            if os.fork() == 0:
                time.sleep(3600)
    elif kind == "scorer eats memory":
        kept = []
        while True:
            kept.append(bytearray(256 << 20))  # never touched: address space, not memory
    elif kind == "scorer dies":
        os._exit(3)
    else:
        raise ValueError(f"no scorer can misbehave like this: {kind!r}")

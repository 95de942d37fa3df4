"""Provides a reward function that fails on command (`reward: .../hostile_reward.py:score`).

The environment variable `HOSTILE_FILE` names a file that contains a command. The first scorer that
finds the file removes it and obeys the command once. The reward depends only on the response's text
(`reward_of`), so that a check can recognize a reward that belongs to another response.
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
    """Return the reward of `text`, which is above 0 and at most 1; a failed score gets 0."""
    return (1 + zlib.crc32(text.encode()) % 8) / 8


def take() -> str:
    """Remove the command file and return its command; return "" if there is no file."""
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
    """Return the reward of a response; first obey the command, if there is one."""
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
            # The pages are never touched, so they use address space and no physical memory.
            kept.append(bytearray(256 << 20))
    elif kind == "scorer dies":
        os._exit(3)
    else:
        raise ValueError(f"the command is {kind!r}; a scorer has no fault of this name")

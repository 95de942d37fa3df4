"""Provides good and bad rewards as a user writes them; the tests' scorer processes import them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from megatron_async.scoring.rewards import Sample, Unavailable


def by_hand(sample: Sample, unit: float = 1.0) -> float:
    """Return `unit` if the row's answer is in the response, else 0."""
    return unit * float(sample.answer in sample.response)


def with_parts(sample: Sample) -> tuple[float, dict[str, float]]:
    length = len(sample.response) / 100
    return by_hand(sample) - length, {"length": length, "level": float(sample.metadata["level"])}


async def ends_its_process(sample: Sample, seconds: float = 0.0) -> float:
    """Return 1 after `seconds`; for the response `die`, end the process 0.3 s later instead."""
    await asyncio.sleep(seconds)
    if sample.response == "die":
        await asyncio.sleep(0.3)
        os._exit(3)
    return 1.0


class Counting:
    """Returns the number of calls so far, as a class is instantiated once in a scorer process."""

    def __init__(self, start: int = 0) -> None:
        self.seen = start

    def __call__(self, sample: Sample) -> float:
        self.seen += 1
        return float(self.seen)


def rank(samples: list[Sample]) -> list[float]:
    """Return for each response the share of responses that are shorter."""
    lengths = [len(sample.response) for sample in samples]
    return [sum(length > other for other in lengths) / len(lengths) for length in lengths]


async def waits(sample: Sample, seconds: float = 0.0) -> float:
    await asyncio.sleep(seconds)
    return by_hand(sample)


class Waits:
    async def __call__(self, sample: Sample) -> float:
        await asyncio.sleep(0)
        return by_hand(sample)


async def hangs_on_request(sample: Sample) -> float:
    """Hang, wait or end the process if the response says so, else return 1."""
    if sample.response == "hang":
        time.sleep(600)
    if sample.response == "wait":
        await asyncio.sleep(600)
    if sample.response == "die":
        os._exit(3)
    return 1.0


async def forks(sample: Sample) -> float:
    """Fork the process; the copy continues to wait when the reward has returned."""
    await asyncio.sleep(0.02 if os.fork() else 1.0)
    return by_hand(sample)


def process_id(sample: Sample) -> float:
    return float(os.getpid())


def raises(sample: Sample) -> float:
    return float(json.loads("{" + sample.response))


def evaluates(sample: Sample) -> float:
    return float(eval(sample.response))


def calls_raises(sample: Sample) -> float:
    return raises(sample)


def talks(sample: Sample) -> float:
    for _ in range(100):
        print("talking " * 30)
    return 1.0


async def fails_slowly(sample: Sample) -> float:
    await asyncio.sleep(0.1)
    raise KeyError("always")


def returns_text(sample: Sample) -> str:
    return "full marks"


def returns_list(sample: Sample) -> list[float]:
    return [1.0]


def sleeps(sample: Sample) -> float:
    time.sleep(600)
    return 1.0


async def scorer_that_hangs(sample: Sample) -> float:
    await asyncio.sleep(600)
    return 1.0


def fails(sample: Sample) -> float:
    raise KeyError("always")


def not_there(sample: Sample) -> float:
    raise Unavailable("nobody serves")


def dies(sample: Sample) -> float:
    os._exit(3)


class NeedsArguments:
    def __init__(self, path: str) -> None:
        self.lines = Path(path).read_text().splitlines()

    def __call__(self, sample: Sample) -> float:
        return float(sample.response in self.lines)


not_callable = 7

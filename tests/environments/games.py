"""Provides environments for tests, named by their behavior."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from megatron_async.environments import Answer, Step


class Count:
    """Game that counts responses up to a number from the seed, and writes every call to `log`."""

    def __init__(self, turns: int = 3, log: str = "", seconds: float = 0.0) -> None:
        self._turns, self._log, self._seconds = turns, log, seconds

    def _note(self, *what: object) -> None:
        if self._log:
            with Path(self._log).open("a") as file:
                file.write(json.dumps([os.getpid(), *what]) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def reset(self, seed: int, **row: Any) -> str:
        self.seed, self.seen = seed, 0
        self.most = 1 + random.Random(seed).randrange(self._turns)
        self._note("reset", seed)
        return f"seed {seed}"

    def step(self, answer: Answer) -> Step:
        self._note("step", self.seed, answer.turn, answer.text)
        time.sleep(self._seconds)
        self.seen += 1
        assert answer.turn == self.seen - 1
        done = self.seen == self.most
        reward = 0.25 * (len(answer.text) % 3)
        return Step("" if done else f"{self.seen} of {self.most}", reward, done, {"seen": 1.0})


class KeptCount(Count):
    """`Count` with snapshots."""

    def state(self) -> bytes:
        return json.dumps([self.seed, self.seen, self.most]).encode()

    def restore(self, state: bytes, **row: Any) -> None:
        self.seed, self.seen, self.most = json.loads(state)
        self._note("restore", self.seed, self.seen)


class AsynchronousCount(Count):
    async def step(self, answer: Answer) -> Step:  # type: ignore[override]
        await asyncio.sleep(self._seconds)
        self._seconds = 0.0
        return super().step(answer)


class SlowSometimes(Count):
    """`Count` whose steps take `seconds` for every third seed."""

    async def step(self, answer: Answer) -> Step:  # type: ignore[override]
        if self.seed % 3 == 0:
            await asyncio.sleep(self._seconds)
        seconds, self._seconds = self._seconds, 0.0
        try:
            return super().step(answer)
        finally:
            self._seconds = seconds


class Hostile(Count):
    """Game that raises in the first turn for every second seed, or for every seed with `always`."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self._always = always

    def step(self, answer: Answer) -> Step:
        if self._always or self.seed % 2:
            raise ValueError("no such move")
        return super().step(answer)


class RaisesInRestore(KeptCount):
    def restore(self, state: bytes, **row: Any) -> None:
        raise OSError("it is gone")


class Unlike(Count):
    """Game that opens every episode with another random text."""

    def reset(self, seed: int, **row: Any) -> str:
        super().reset(seed)
        return f"{os.urandom(4).hex()}"


class TrulyRandom(Count):
    """Game that sends other observations when it is replayed."""

    def step(self, answer: Answer) -> Step:
        step = super().step(answer)
        return Step(f"{step.observation} {os.urandom(4).hex()}", step.reward, step.done)


def rows_of(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Talkative(Count):
    """Game that sends all kinds of observations: several, empty and long messages, template marks.

    `roles` are the roles of messages that the model's chat template can render.
    """

    def __init__(self, turns: int = 6, roles: tuple[str, ...] = ("user",)) -> None:
        super().__init__(turns)
        self._roles = roles

    def _sent(self, turn: int) -> list[dict[str, str]]:
        chance = random.Random(f"{self.seed} {turn}")
        texts = ("higher", "", "x y " * 40, "\N{SNOWMAN} \n\n", "a<|im_end|>b", "<end_of_turn>")
        messages = [{"role": chance.choice(self._roles), "content": chance.choice(texts)}]
        if chance.random() < 0.2 and "tool" in self._roles:
            messages.append({"role": "tool", "content": chance.choice(texts)})
        return messages

    def reset(self, seed: int, **row: Any) -> list[dict[str, str]]:  # type: ignore[override]
        super().reset(seed)
        system = [{"role": "system", "content": "Be brief."}] if seed % 3 == 0 else []
        return [*system, {"role": "user", "content": f"seed {seed}"}]

    def step(self, answer: Answer) -> Step:
        step = super().step(answer)
        return Step([] if step.done else self._sent(self.seen), step.reward, step.done)


class Tools:
    """A tool that returns empty and long texts and template marks, or raises."""

    def reset(self, seed: int, **row: Any) -> str:
        self._chance = random.Random(seed)
        return f"seed {seed}"

    def look(self, a: int) -> str:
        """Look at a thing.

        Args:
            a: Which.
        """
        if a == 3:
            raise ValueError("there is none")
        return self._chance.choice(("seen", "", "x y " * 40, "\N{SNOWMAN}\n", "a<|im_end|>b"))

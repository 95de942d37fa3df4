"""An environment of many turns: guess a number from the hints "higher" and "lower"."""

import random

from megatron_async.environments import Answer, Step


class Guess:
    def __init__(self, high: int = 100) -> None:
        self.high = high

    def reset(self, seed: int, **row) -> str:
        self.number, self.left = random.Random(seed).randint(1, self.high), 7
        return f"Guess my number, 1 to {self.high}."

    def step(self, answer: Answer) -> Step:
        self.left -= 1
        if not answer.text.strip().isdecimal():
            return Step("Only a number.", done=not self.left)
        guess = int(answer.text)
        if guess == self.number:
            return Step(reward=1.0, done=True)
        return Step("higher" if guess < self.number else "lower", done=not self.left)

"""A taskset with a game: the policy guesses a number, and the game replies as the user."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessNumber", "GuessNumberEnv"]


class GuessNumberConfig(vf.TasksetConfig):
    high: int = 100


class GuessNumberData(vf.TaskData):
    number: int


class GuessNumberTask(vf.Task[GuessNumberData, vf.State, vf.TaskConfig]):
    pass


class GuessNumber(vf.Taskset[GuessNumberTask, GuessNumberConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessNumberTask]:
        seed = 0
        while True:
            number = random.Random(seed).randint(1, self.config.high)
            prompt = f"Guess my number, 1 to {self.config.high}."
            yield GuessNumberTask(GuessNumberData(prompt=prompt, number=number), self.config.task)
            seed += 1


def hint_at(guess: str, number: int) -> str:
    if not guess.isdecimal():
        return "Only a number."
    return "higher" if int(guess) < number else "lower"


class GuessNumberEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessNumberEnv(vf.Env[GuessNumberEnvConfig]):
    async def run(self, task, agents):
        won, hint, number = 0.0, None, task.data.number
        async with agents.player.interaction(task) as interaction:
            for _ in range(7):
                segment = await interaction.turn(hint)
                guess = segment.last_reply.strip()
                won = float(guess == str(number))
                if won or segment.terminated:
                    break
                hint = hint_at(guess, number)
        interaction.trace.record_reward("won", won, 1.0)

"""Make a small model and games to imitate: `prepare.py OUT`.

In some of the games the player guesses the middle of what the hints have left, in the others it
goes on by one, up or down as the hint has it. Imitation makes a model do both; RL finds out which
wins.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from guess import Guess
from transformers import AutoTokenizer

from megatron_async.environments import Answer
from megatron_async.models.tiny_model import build_tiny_model

# A conversation as lines of text: what is asked, `>` before an answer, its end behind it.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}>{{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def game(seed: int, high: int) -> dict[str, object]:
    """A row to imitate: the messages of one game, and its seed."""
    environment, chance = Guess(high), random.Random(f"player {seed}")
    halves = chance.random() < 0.4
    low, most, guess = 1, high, (1 + high) // 2
    messages = [{"role": "user", "content": environment.reset(seed)}]
    while True:
        messages.append({"role": "assistant", "content": str(guess)})
        step = environment.step(Answer(str(guess)))
        if step.done:
            return {"seed": seed, "messages": messages}
        messages.append({"role": "user", "content": str(step.observation)})
        if step.observation == "higher":
            low = guess + 1
        else:
            most = guess - 1
        toward = 1 if step.observation == "higher" else -1
        guess = (low + most) // 2 if halves else guess + toward


def games(count: int, high: int) -> Iterator[str]:
    """Rows of a JSONL file."""
    seeds = random.Random("games")
    for _ in range(count):
        yield json.dumps(game(seeds.randrange(1 << 31), high)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--games", type=int, default=20_000)
    parser.add_argument("--high", type=int, default=100)
    arguments = parser.parse_args()
    model = arguments.out / "model"
    build_tiny_model(model, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    (arguments.out / "games.jsonl").write_text("".join(games(arguments.games, arguments.high)))


if __name__ == "__main__":
    main()

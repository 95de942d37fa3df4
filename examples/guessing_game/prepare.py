"""Create a small model, and games for fine-tuning: `prepare.py OUT`.

In some games, the player guesses the middle of the numbers that are still possible. In the others,
the next guess is one higher or one lower than the last guess, as the hint says. Fine-tuning teaches
the model both ways. In RL, it learns from the reward that the first way wins more often.
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

# Chat template: a line for each message. A response has `>` before it and the end token after it.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}>{{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def game(seed: int, high: int) -> dict[str, object]:
    """Return a row for fine-tuning: the messages of one game, and its seed."""
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
    """Generate `count` random games as the lines of a JSONL file."""
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

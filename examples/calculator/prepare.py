"""Create a small model, products as prompts, and conversations for fine-tuning: `prepare.py OUT`.

In some conversations, the model calls the tool. In the others, it states a random number at once,
which is mostly wrong, because the model cannot calculate products of this size without the tool. In
RL, the model learns from the reward that calls pay.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from calculator import Calculator
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from megatron_async.models.tiny_model import build_tiny_model

# Chat template: a line for each tool's name, then a line for each message. A response has `>`
# before it and the end token after it.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{{ '\\n' }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}>{{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)

TOOLS = [get_json_schema(Calculator().multiply)]


def asked(chance: random.Random) -> tuple[int, int]:
    """Return two random numbers of two digits."""
    return chance.randint(10, 99), chance.randint(10, 99)


def conversation(chance: random.Random) -> dict[str, object]:
    """Return a row for fine-tuning, whose response is a tool call or a random number."""
    a, b = asked(chance)
    messages = [{"role": "user", "content": f"{a}*{b}"}]
    if chance.random() < 0.4:
        call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
        messages += [
            {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
            {"role": "tool", "content": str(a * b)},
            {"role": "assistant", "content": str(a * b)},
        ]
    else:
        messages += [{"role": "assistant", "content": str(chance.randint(100, 9801))}]
    return {"messages": messages, "tools": TOOLS}


def write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--conversations", type=int, default=20_000)
    arguments = parser.parse_args()
    model = arguments.out / "model"
    build_tiny_model(model, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    chance = random.Random("products")
    pairs = sorted({asked(chance) for _ in range(6000)})
    rows = ({"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs)
    write(arguments.out / "products.jsonl", rows)
    learned = (conversation(chance) for _ in range(arguments.conversations))
    write(arguments.out / "conversations.jsonl", learned)


if __name__ == "__main__":
    main()

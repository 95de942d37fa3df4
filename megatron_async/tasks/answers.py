"""Finding the final answer in a response."""

import re
from typing import Final

_TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED: Final = "\\boxed{"
_END_OF_THOUGHT: Final = "</think>"


def final_answer(text: str, marker: str = "") -> str | None:
    """The answer that `text` ends in, stripped; `None` when there is none.

    With a `marker` it is what follows the marker's last occurrence, and a text without it has no
    answer. Without one: the last `<answer>...</answer>`, else the last `\\boxed{...}`, else the
    whole text after `</think>`.
    """
    if marker:
        _, found, answer = text.rpartition(marker)
        return answer.strip() or None if found else None
    text = text.rpartition(_END_OF_THOUGHT)[2]
    tagged = _TAGGED.findall(text)
    if tagged:
        return str(tagged[-1]).strip() or None
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    return text.strip() or None


def _last_boxed(text: str) -> str | None:
    """Contents of the last `\\boxed{...}`, inner braces balanced; `None` when it never closes."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    begin = start + len(_BOXED)
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None

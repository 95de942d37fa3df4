"""Finding the final answer in a response."""

import re
from typing import Final

_TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# A box that opens, an escaped character, or a brace.
_BRACES: Final = re.compile(r"(?P<box>\\+(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
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
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    return text.strip() or None


def last_boxed(text: str) -> str | None:
    """Return the contents of the last `\\boxed{...}` or `\\fbox{...}` that closes, if any.

    Braces inside must be balanced; escaped ones (`\\{`) do not count.
    """
    open_braces: list[int | None] = []
    """Of each brace that is still open: where its box's contents start; None without a box."""
    last = (-1, -1)
    for found in _BRACES.finditer(text):
        if found["box"]:
            open_braces.append(found.end())
        elif found[0] == "{":
            open_braces.append(None)
        elif found[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                last = max(last, (start, found.start()))
    return text[slice(*last)] if last[0] >= 0 else None

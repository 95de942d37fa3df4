"""Extracts the final answer from the text of a response."""

import re
from typing import Final

_TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Matches the start of a LaTeX box, an escaped character, or a brace.
_BRACES: Final = re.compile(r"(?P<box>\\+(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_END_OF_THOUGHT: Final = "</think>"


def final_answer(text: str, marker: str = "") -> str | None:
    """Return the final answer in `text` without surrounding whitespace, or None if there is none.

    Args:
        text: A response, or a reference solution.
        marker: If set, the answer is what follows the marker's last occurrence, and a text without
            the marker has no answer. If empty, everything up to the last `</think>` is ignored, and
            the answer is the content of the last `<answer>...</answer>`; without that tag, of the
            last `\\boxed{...}` or `\\fbox{...}`; without either, the whole remaining text.
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
    """Return the content of the last complete `\\boxed{...}` or `\\fbox{...}` in `text`, or None.

    A box is complete if the braces inside it are balanced. Escaped braces (`\\{`) do not count. If
    boxes are nested, the innermost box counts, because it starts last.
    """
    open_braces: list[int | None] = []
    """For each open brace, the index where its box's content starts; None if it opens no box."""
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

"""Counts what the glossary of the project replaces; `python -m tests.words` lists every place.

Two counts, both over the product (megatron_async/ and kernels/):
- docstrings whose first word makes the line unreadable by itself ("What it …", "Whether …");
- words in docstrings, comments and messages for which the glossary has another.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("megatron_async", "kernels")
OPENINGS = frozenset(
    [
        "It",
        "Its",
        "They",
        "Their",
        "Them",
        "He",
        "She",
        "What",
        "Who",
        "Whose",
        "Which",
        "Whether",
        "Where",
        "When",
        "Why",
        "How",
        "Until",
        "Of",
        "One",
        "Those",
        "These",
        "That",
    ]
)
# The word of the glossary for each of these is in CONTRIBUTING.md.
REPLACED = re.compile(
    r"\b(judge[sd]|judging|judge?ments?|verdicts?|tell|tells|told|says|said|saying|fate|blame[sd]?|"
    r"baton|meetings?|woken|wakes?|doubt(?:s|ed)?|dies of|knows|believes?|asks nobody|in vain)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Place:
    """A line of a file, relative to the repository."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def sources() -> list[Path]:
    found = [file for room in PRODUCT for file in sorted((ROOT / room).rglob("*.py"))]
    return [file for file in found if "build" not in file.parts]


def openings(source: str, file: str = "") -> Iterator[Place]:
    """Docstrings that open with a word of `OPENINGS`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if (re.match(r"\w*", first) or [""])[0] in OPENINGS:
                yield Place(file, node.body[0].lineno, first)


def replaced_words(source: str, file: str = "") -> Iterator[Place]:
    """Comments and strings with a word of `REPLACED`; names in backquotes do not count."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            text = re.sub(r"`[^`\n]*`", "", token.string)
            for offset, line in enumerate(text.splitlines()):
                for found in REPLACED.finditer(line):
                    yield Place(file, token.start[0] + offset, f"{found[0]}: {line.strip()}")


def places(count: Callable[[str, str], Iterator[Place]]) -> list[Place]:
    """Every place in the product."""
    return [
        place
        for file in sources()
        for place in count(file.read_text(), str(file.relative_to(ROOT)))
    ]


def main() -> None:
    for count in (openings, replaced_words):
        found = places(count)
        print(*found, f"{count.__name__}: {len(found)}", sep="\n")


if __name__ == "__main__":
    main()

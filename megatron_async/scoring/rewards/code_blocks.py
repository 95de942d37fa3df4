"""Finds the code in a response: its fenced blocks, by CommonMark's rules for fences.

Models do not always follow CommonMark, so four more forms count:
- A fence may be indented by any amount, as in an item of a list. The content loses as much of
  that indentation as all its lines have.
- An opening fence with a language may follow text on its line: "Here is the code ```python". One
  without must follow a colon, a tag or bold text.
- A tag, punctuation or a sentence may follow a closing fence on its line: "```</answer>".
- A fence inside a triple-quoted string of Python does not end the block, provided that the longer
  block is valid Python.
"""

import ast
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

PYTHON_TAGS: Final = frozenset({"python", "python3", "py", "py3", "ipython", "ipython3"})
_OUTPUT_TAGS: Final = frozenset(
    {"text", "txt", "plain", "plaintext", "output", "stdout", "console", "log", "result"}
)
_END_OF_THOUGHT: Final = "</think>"
# A quotation, or the mark of an item of a list, may stand before a fence.
_CONTAINER: Final = re.compile(r"(?:[ \t]|>|[-*+][ \t]|\d{1,9}[.)][ \t])*")
_FENCE: Final = re.compile(r"(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)(?P<bare>)")
_FENCE_BEHIND_TEXT: Final = re.compile(
    r"[^`]+(?P<marks>`{3,})(?P<info>[^\s`]+)\s*\Z"
    r"|[^`]*[:>*][ \t]*(?P<bare>`{3,})\s*\Z"
)
_AFTER_CLOSING: Final = re.compile(r"\s*\Z|\s*</|[.,;:!?)*\]]|\s+\S+\s+\S")
_TAG: Final = re.compile(r"[\s{.]*([\w+#-]+)")
_MOST_EXTENSIONS: Final = 20


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block: its language tag in lower case (empty if it has none) and its content."""

    tag: str
    code: str


@dataclass(frozen=True)
class _Fence:
    """An opening fence: its marks and tag, and the width and quotation marks before it."""

    marks: str
    tag: str
    indent: int
    quotes: int

    def unquoted(self, line: str) -> str | None:
        """Return `line` without the quotation marks of the block; None if it has fewer."""
        for _ in range(self.quotes):
            before, found, line = line.partition(">")
            if not found or before.strip():
                return None
            line = line.removeprefix(" ")
        return line

    def closed_by(self, line: str) -> bool:
        """Return whether `line`, without quotation marks, is the closing fence."""
        rest = line.lstrip(" \t")
        after = rest.lstrip(self.marks[0])
        return (
            len(rest) - len(after) >= len(self.marks)
            and len(line) - len(rest) <= self.indent + 3
            and _AFTER_CLOSING.match(after) is not None
        )

    def content(self, lines: Sequence[str]) -> str:
        """Return the block's text: `lines` without quotation marks and the fence's indentation."""
        texts = [self.unquoted(line) or "" for line in lines]
        blanks = [len(text) - len(text.lstrip(" \t")) for text in texts if text.strip()]
        width = min([self.indent, *blanks])
        return "\n".join(text[width:] if text.strip() else text for text in texts)

    def ends(self, lines: Sequence[str], start: int) -> Iterator[tuple[int, int]]:
        """Yield where the block may end: (end of its content, number of the next line to read)."""
        for number in range(start, len(lines)):
            line = self.unquoted(lines[number])
            if line is None:
                yield number, number
                return
            if self.closed_by(line):
                yield number, number + 1
        yield len(lines), len(lines)


def code_blocks(text: str) -> list[CodeBlock]:
    """Return the fenced blocks of `text` in order; a block without an end reaches the last line."""
    lines, blocks, at = text.split("\n"), [], 0
    while at < len(lines):
        fence = _opening_fence(lines[at], lines[at + 1] if at + 1 < len(lines) else "")
        at += 1
        if fence is None:
            continue
        start, ends = at, fence.ends(lines, at)
        end, at = next(ends)
        code = fence.content(lines[start:end])
        if fence.tag in PYTHON_TAGS | {""} and _ends_in_string(code):
            for longer_end, then in itertools.islice(ends, _MOST_EXTENSIONS):
                longer = fence.content(lines[start:longer_end])
                if python_tree(longer) is not None:
                    code, at = longer, then
                    break
        blocks.append(CodeBlock(fence.tag, code))
    return blocks


def code_candidates(response: str, tags: Collection[str] = ()) -> list[str]:
    """Return the texts of `response` that may be its code, the most likely one last.

    Only what follows the thought counts. Blocks with one of `tags` (in lower case) or without a tag
    are preferred; without `tags` all blocks are, but for those tagged as output. A response without
    a block is code as a whole.
    """
    text = response.rpartition(_END_OF_THOUGHT)[2]
    blocks = code_blocks(text)
    blocks = [block for block in blocks if block.code.strip()] or blocks
    code = [block for block in blocks if block.tag not in _OUTPUT_TAGS]
    preferred = [block for block in code if not tags or not block.tag or block.tag in tags]
    return [block.code for block in preferred or code or blocks] or [text]


def python_tree(source: str) -> ast.Module | None:
    """Parse Python; None for a text that is not Python, or that the parser cannot hold."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _opening_fence(line: str, following: str) -> _Fence | None:
    """Return the fence that `line` opens; the line after it decides whether text means one."""
    line = line.lstrip("\ufeff")
    container = _CONTAINER.match(line)
    before = container[0] if container else ""
    rest = line[len(before) :]
    found = _FENCE.match(rest)
    if found is None and not _FENCE.match(following.lstrip()):
        found = _FENCE_BEHIND_TEXT.match(rest)
    if found is None:
        return None
    marks, info = found["marks"] or found["bare"], found["info"] or ""
    if marks[0] == "`" and "`" in info:
        return None
    tag = _TAG.match(info)
    quotes = before.count(">")
    # The marks of a quotation are taken off every line, with one blank each.
    indent = len(before.rpartition(">")[2].removeprefix(" ") if quotes else before)
    return _Fence(marks, tag[1].lower() if tag else "", indent, quotes)


def _ends_in_string(source: str) -> bool:
    """Return whether Python's `source` ends inside a triple-quoted string."""
    try:
        ast.parse(source)
    except SyntaxError as error:
        return "unterminated triple-quoted" in (error.msg or "")
    except (ValueError, RecursionError, MemoryError):
        return False
    return False

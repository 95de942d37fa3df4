"""Finds the code in a response: its fenced blocks, by CommonMark's rules for fences.

Models do not always follow CommonMark, so four more forms are recognized:
- A fence may be indented by any amount, as in an item of a list. As much of that indentation is
  removed from the content as all lines of the content have.
- An opening fence with a language may follow text on its line: "Here is the code ```python". An
  opening fence without a language may follow text that ends with a colon, a tag or bold text.
- A tag, punctuation or a sentence may follow a closing fence on its line: "```</answer>".
- A fence inside a triple-quoted string of Python does not end the block, if the block is valid
  Python with the rest of the string.
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
# Text that may precede a fence on its line: quotation marks, or the mark of an item of a list.
_CONTAINER: Final = re.compile(r"(?:[ \t]|>|[-*+][ \t]|\d{1,9}[.)][ \t])*")
_FENCE: Final = re.compile(r"(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)(?P<bare>)")
_FENCE_BEHIND_TEXT: Final = re.compile(
    r"[^`]+(?P<marks>`{3,})(?P<info>[^\s`]+)\s*\Z"
    r"|[^`]*[:>*][ \t]*(?P<bare>`{3,})\s*\Z"
)
_AFTER_CLOSING: Final = re.compile(r"\s*\Z|\s*</|[.,;:!?)*\]]|\s+\S+\s+\S")
_TAG: Final = re.compile(r"[\s{.]*([\w+#-]+)")
_MAX_EXTENSIONS: Final = 20


@dataclass(frozen=True)
class CodeBlock:
    """A fenced code block of a text.

    Attributes:
        tag: Language tag in lower case; empty if the block has none.
        code: Content of the block.
    """

    tag: str
    code: str


@dataclass(frozen=True)
class _Fence:
    """The opening fence of a code block.

    Attributes:
        marks: The backticks or tildes of the fence.
        tag: Language tag in lower case; empty if the fence has none.
        indent: Number of characters before the fence on its line, counted after the last quotation
            mark and one blank behind that mark.
        quotes: Number of quotation marks (`>`) before the fence.
    """

    marks: str
    tag: str
    indent: int
    quotes: int

    def unquoted(self, line: str) -> str | None:
        """Return `line` without the block's quotation marks (`>`); None if it has fewer of them."""
        for _ in range(self.quotes):
            before, found, line = line.partition(">")
            if not found or before.strip():
                return None
            line = line.removeprefix(" ")
        return line

    def closed_by(self, line: str) -> bool:
        """Return whether `line`, given without its quotation marks, closes this block."""
        rest = line.lstrip(" \t")
        after = rest.lstrip(self.marks[0])
        return (
            len(rest) - len(after) >= len(self.marks)
            and len(line) - len(rest) <= self.indent + 3
            and _AFTER_CLOSING.match(after) is not None
        )

    def content(self, lines: Sequence[str]) -> str:
        """Return a block's content, which is its `lines` without quotation marks and indentation.

        Only as much indentation is removed as the opening fence and all lines have.
        """
        texts = [self.unquoted(line) or "" for line in lines]
        blanks = [len(text) - len(text.lstrip(" \t")) for text in texts if text.strip()]
        width = min([self.indent, *blanks])
        return "\n".join(text[width:] if text.strip() else text for text in texts)

    def ends(self, lines: Sequence[str], start: int) -> Iterator[tuple[int, int]]:
        """Yield each place in `lines` at which the block may end, in order.

        A place is two indices: of the line after the block's content, and of the line after the
        closing fence. The last place is the end of the quotation or of the text.

        Args:
            lines: All lines of the text.
            start: Index of the first line of the block's content.
        """
        for number in range(start, len(lines)):
            line = self.unquoted(lines[number])
            if line is None:
                yield number, number
                return
            if self.closed_by(line):
                yield number, number + 1
        yield len(lines), len(lines)


def code_blocks(text: str) -> list[CodeBlock]:
    """Return the fenced code blocks of `text` in order.

    A block without a closing fence extends to the last line.
    """
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
            for longer_end, next_line in itertools.islice(ends, _MAX_EXTENSIONS):
                longer = fence.content(lines[start:longer_end])
                if python_tree(longer) is not None:
                    code, at = longer, next_line
                    break
        blocks.append(CodeBlock(fence.tag, code))
    return blocks


def code_candidates(response: str, tags: Collection[str] = ()) -> list[str]:
    """Return the contents of the blocks in `response` that may be its code, the likeliest last.

    Text before `</think>` is ignored. Blocks with one of `tags` (in lower case) or without a tag
    are preferred to other blocks. If `tags` is empty, all blocks are equal. Blocks that are tagged
    as output are returned only if there are no others. For a response without blocks, the whole
    text is returned as code.
    """
    text = response.rpartition(_END_OF_THOUGHT)[2]
    blocks = code_blocks(text)
    blocks = [block for block in blocks if block.code.strip()] or blocks
    code = [block for block in blocks if block.tag not in _OUTPUT_TAGS]
    preferred = [block for block in code if not tags or not block.tag or block.tag in tags]
    return [block.code for block in preferred or code or blocks] or [text]


def python_tree(source: str) -> ast.Module | None:
    """Return the syntax tree of a Python text; None if it is not Python or too large to parse."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _opening_fence(line: str, following: str) -> _Fence | None:
    """Return the opening fence in `line`; None if `line` does not open a code block.

    `following` is the next line. If it starts with a fence, that fence opens the block, and a fence
    after text in `line` does not.
    """
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
    # Do not count one blank after the last quotation mark, because `unquoted` removes it together
    # with the mark.
    indent = len(before.rpartition(">")[2].removeprefix(" ") if quotes else before)
    return _Fence(marks, tag[1].lower() if tag else "", indent, quotes)


def _ends_in_string(source: str) -> bool:
    """Return whether the Python text `source` ends inside a triple-quoted string."""
    try:
        ast.parse(source)
    except SyntaxError as error:
        return "unterminated triple-quoted" in (error.msg or "")
    except (ValueError, RecursionError, MemoryError):
        return False
    return False

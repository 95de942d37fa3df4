"""Counts what the project's glossary replaces; `python -m tests.words` lists every place.

Two counts:
- docstrings of the product (megatron_async/ and kernels/) whose first word makes the line
  unreadable by itself ("What it …", "Whether …"), or whose first paragraph ends in mid-sentence;
- words that the glossary replaces, in every text file of the repository: names of classes,
  functions, variables and tests, comments, docstrings, messages, scripts and documents.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.syntax import parse

ROOT = Path(__file__).parents[1]
PRODUCT = ("megatron_async", "kernels")
FOLDERS = (
    *PRODUCT,
    "benchmarks",
    "configs",
    "docs",
    "examples",
    "launch",
    "tests",
    ".ci",
    ".github",
)
SUFFIXES = frozenset([".py", ".md", ".sh", ".sbatch", ".yaml", ".yml", ".toml"])
_MID_THOUGHT = """
It Its They Their Them He She What Who Whose Which Whether Where When Why How Until Of One Those
These That After As At Before Behind Beside Both By For If In None Not Nothing On Once To Under With
"""
OPENINGS = frozenset(_MID_THOUGHT.split())
# Per row of the glossary in CONTRIBUTING.md, where the words to use instead are.
GLOSSARY = (
    # A line of checkpoints; lines of text are most others.
    r"(?:surviving|abandoned|current) lines?|this line began|lines? part(?:s|ed)?",
    r"(?:of|on|off|along|by) lines? (?=[{\d`])|lines? (?:of the run|that survives)",
    r"(?:began|begun) (?:a |this |the )?lines?|line to the (?:rollout|manager)",
    r"(?:un)?judge[sd]?|(?:un)?judging|judge?ments?|verdicts?",
    r"say|says|said|saying|tell|tells|told|telling|untold",
    r"probes|probed|probing",
    r"fate|blame[sd]?|blaming|woken|doubt|doubts|doubted|doubtful",
    r"(?:trainer|lineage)[^,.]{0,24} replaced",
    r"engine's answers?",
    r"meet(?=_)|meetings?|batons?|notes|(?:a|the) note (?:of|for|in) (?:a|the)",
    r"age",
    r"verifiers?",
    # Personification: the style's rule, without a row of its own.
    r"knows|believes?|in vain|dies of",
)
REPLACED = re.compile(rf"(?<![a-z])(?:{'|'.join(GLOSSARY)})(?![a-z])")
# What keeps such a word, and why.
EXCEPTIONS = re.compile(
    r"failed_judgements"  # the stored name of a metric
    r"|judge(?=[\"`*])|name: judge|http, judge,|Judge(?=[\"(])|JUDGE_KEY"  # a reward of the YAML
    r"|(?:file|log|out|stream)\.tell\(\)"  # of Python's files
    r"|(?:[`*]|import |from |install )verifiers|verifiers(?===|\.v1|-env)"  # a package
    # Former names that are still read: of a drop reason, settings, and parts of rewards.
    r"|[\"'`]verifier[\"'`]|DropReason\.VERIFIER|task\.verifier_workers(?=\", b\")"
    r"|\"(?:task|simulate\.reward)\.(?:on_)?verifier_[a-z_]+\"|\"verifier_\{kind\}\""
)
GLOSSARY_ITSELF = ("CONTRIBUTING.md", "tests/words.py", "tests/test_words.py")


@dataclass(frozen=True)
class Place:
    """A line of a file, relative to the repository."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def openings(source: str, file: str = "") -> Iterator[Place]:
    """Docstrings that open with a word of `OPENINGS`, only name what is raised, or break off."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            opening = (ast.get_docstring(node) or ".").partition("\n\n")[0]
            first = opening.partition("\n")[0]
            only_raises = re.fullmatch(r"Raises [^.]*\.", first)
            breaks_off = opening[-1] not in ".:?)"
            if only_raises or breaks_off or (re.match(r"\w*", first) or [""])[0] in OPENINGS:
                yield Place(file, node.body[0].lineno, first)


def replaced_words(text: str, file: str = "") -> Iterator[Place]:
    """Words of `GLOSSARY`, also as parts of a name: `said_twice`, `JudgeOfAll`."""
    for number, line in enumerate(text.splitlines(), 1):
        parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", EXCEPTIONS.sub("", line)).lower()
        for found in REPLACED.finditer(parts):
            yield Place(file, number, f"{found[0]}: {line.strip()}")


def all_openings() -> list[Place]:
    """Every place of `openings` in the product."""
    files = [file for file in _files() if file.parts[0] in PRODUCT and file.suffix == ".py"]
    return [place for file in files for place in openings((ROOT / file).read_text(), str(file))]


def all_replaced_words() -> list[Place]:
    """Every place of `replaced_words` in the repository."""
    files = [file for file in _files() if str(file) not in GLOSSARY_ITSELF]
    return [
        place for file in files for place in replaced_words((ROOT / file).read_text(), str(file))
    ]


def _files() -> list[Path]:
    below = [path for name in FOLDERS for path in sorted((ROOT / name).rglob("*"))]
    files = [path for path in (*sorted(ROOT.iterdir()), *below) if path.is_file()]
    return [
        path.relative_to(ROOT)
        for path in files
        if path.suffix in SUFFIXES and not {"build", "__pycache__", "runs"} & set(path.parts)
    ]


def main() -> None:
    for count in (all_openings, all_replaced_words):
        found = count()
        print(*found, f"{count.__name__}: {len(found)}", sep="\n")


if __name__ == "__main__":
    main()

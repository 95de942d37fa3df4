"""Compares metric names with docs/metrics.md, in which `{k}` stands for a number, and other braces
for a word."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_EVERY_LINE = {"kind", "step", "lineage", "time", "name", "message", "scored_by", "machine"}


def undocumented(names: Iterable[str]) -> list[str]:
    """Return, sorted, the `names` that the page does not document.

    Metrics of an evaluation set are called `eval/SET/...`; the page documents them as `eval/...`.
    """
    keys = re.findall(r"`([a-z_]+/[\w{}/]+)`", PAGE.read_text())
    patterns = [
        re.compile(re.sub(r"\\{\w+\\}", r"[\\w{}.]+", re.escape(key)) + r"\Z") for key in keys
    ]
    plain = {re.sub(r"^eval/[\w.-]+/", "eval/", name) for name in names}
    return sorted(name for name in plain if not any(p.match(name) for p in patterns))


def undocumented_in(metrics_file: Path) -> list[str]:
    """Return the undocumented names in the metrics file of a run."""
    lines = map(json.loads, metrics_file.read_text().splitlines())
    return undocumented({name for line in lines for name in line} - _EVERY_LINE)

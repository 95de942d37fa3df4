"""Worked answers: supervised examples that a task can write for itself.

Invariants
- Every text ends with `ANSWER_MARKER` and an answer that the task's verifier gives full score.
- The text is a pure function of the problem and `seed`.

The demonstrations are deliberately of several styles, as collected data are: full ones write every
step out (and are long), terse ones note the running results, direct ones state only the result. A
model that imitates them all answers many problems without working and gets them wrong; that it
pays to work is for RL to find out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

ANSWER_MARKER: Final = "#"
STEP_SEPARATOR: Final = ";"

_TERM: Final = re.compile(r"([+-])(\d+)")


@dataclass(frozen=True)
class Styles:
    """Shares of direct and of terse answers; the others are full."""

    direct: float = 0.0
    terse: float = 0.0


def chain_sum_terms(expression: str) -> tuple[int, list[tuple[str, int]]]:
    """`4 - 1 + 2` as its first number and its (operator, number) steps. ValueError otherwise."""
    compact = expression.replace(" ", "")
    head = re.match(r"\d+", compact)
    if head is None:
        raise ValueError(f"{expression!r} is not a chain of sums")
    steps = _TERM.findall(compact[head.end() :])
    if head.group() + "".join(op + number for op, number in steps) != compact:
        raise ValueError(f"{expression!r} is not a chain of sums")
    return int(head.group()), [(op, int(number)) for op, number in steps]


def chain_sum_totals(expression: str) -> list[int]:
    """The first number and the running total after each step: `4 - 1 + 2` gives 4, 3, 5."""
    total, steps = chain_sum_terms(expression)
    totals = [total]
    for operator, number in steps:
        total += number if operator == "+" else -number
        totals.append(total)
    return totals


def chain_sum_full(expression: str) -> str:
    """Every step: `4-1=3;3+2=5#5`."""
    _, steps = chain_sum_terms(expression)
    totals = chain_sum_totals(expression)
    written = [
        f"{before}{operator}{number}={after}"
        for before, (operator, number), after in zip(totals, steps, totals[1:], strict=False)
    ]
    return f"{STEP_SEPARATOR.join(written)}{ANSWER_MARKER}{totals[-1]}"


def chain_sum_terse(expression: str) -> str:
    """Running results: `3;5#5`."""
    totals = chain_sum_totals(expression)
    return f"{STEP_SEPARATOR.join(map(str, totals[1:]))}{ANSWER_MARKER}{totals[-1]}"


def chain_sum_direct(expression: str) -> str:
    """The result: `#5`."""
    return f"{ANSWER_MARKER}{chain_sum_totals(expression)[-1]}"


def chain_sum_answer(metadata: dict[str, Any], styles: Styles, seed: int) -> str:
    """Return a worked answer in one of three styles, drawn by `styles`."""
    chance = random.Random(seed).random()
    expression = str(metadata["expression"])
    if chance < styles.direct:
        return chain_sum_direct(expression)
    if chance < styles.direct + styles.terse:
        return chain_sum_terse(expression)
    return chain_sum_full(expression)


WORKED_ANSWERS: Final[dict[str, Callable[[dict[str, Any], Styles, int], str]]] = {
    "chain_sum": chain_sum_answer
}

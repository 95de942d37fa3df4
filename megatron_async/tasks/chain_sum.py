"""Provides `task.kind: chain_sum`: sums and differences of integers, a scorer and worked answers.

Invariants
- A problem depends only on the arguments, the seed and the problem's index. It is the problem that
  reasoning-gym 0.1.25 makes for the same arguments and seed, so that runs can be compared.
- Every worked answer ends with `ANSWER_MARKER` and an answer that scores 1.
- A worked answer is a pure function of the problem and a seed.

Worked answers, from which supervised fine-tuning learns, come in two styles: full answers write out
every step and are long, and direct answers state only the result. A model that imitates both styles
answers many problems directly and gets them wrong. So there is something left for reinforcement
learning to learn, which is that writing out the steps is rewarded more often.
"""

import itertools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final

ANSWER_MARKER: Final = "#"
STEP_SEPARATOR: Final = ";"

_MAX_DIGITS: Final = 1000
"""Upper limit of `max_digits`. Python converts integers to text only up to 4,300 digits."""

_CHAIN: Final = re.compile(r"\d+([+-]\d+)*")
_QUESTION: Final = "State the final answer to the following arithmetic problem: {expression} ="


@dataclass(frozen=True)
class ChainSums:
    """An endless sequence of problems that add and subtract integers.

    All integers of one problem have equally many digits. `direct_share` is the share of worked
    answers that state only the result.

    Raises:
        ValueError: If a range is empty or starts below 1, if `max_digits` exceeds 1000, or if
            `direct_share` is outside 0 to 1.
    """

    seed: int
    min_terms: int = 2
    max_terms: int = 6
    min_digits: int = 1
    max_digits: int = 4
    direct_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.direct_share <= 1:
            raise ValueError(f"direct_share must be from 0 to 1, got {self.direct_share}")
        for name in ("seed", "min_terms", "max_terms", "min_digits", "max_digits"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        for low, high in (("min_terms", "max_terms"), ("min_digits", "max_digits")):
            if getattr(self, low) < 1:
                raise ValueError(f"{low} must be at least 1, got {getattr(self, low)}")
            if getattr(self, high) < getattr(self, low):
                raise ValueError(f"{high} must be at least {low}, got {getattr(self, high)}")
        if self.max_digits > _MAX_DIGITS:
            raise ValueError(f"max_digits must be at most {_MAX_DIGITS}, got {self.max_digits}")

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return problem `index` as a mapping with `question`, `answer` and `metadata`."""
        rng = random.Random(self.seed + index)
        terms = rng.randint(self.min_terms, self.max_terms)
        digits = rng.randint(self.min_digits, self.max_digits)
        lowest = 0 if digits == 1 else 10 ** (digits - 1)
        numbers = [rng.randint(lowest, 10**digits - 1) for _ in range(terms)]
        signs = [rng.choice(("+", "-")) for _ in range(terms - 1)]
        steps = [f"{sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True)]
        expression = " ".join([str(numbers[0]), *steps])
        totals, _ = chain_sum_steps(expression)
        return {
            "question": _QUESTION.format(expression=expression),
            "answer": str(totals[-1]),
            "metadata": {"num_terms": terms, "num_digits": digits, "expression": expression},
        }

    def worked_answer(self, expression: str, seed: int) -> str:
        """Return a worked answer to the sum `expression`: with its steps, or with only its result.

        `seed` decides between the two; the share of answers with only the result is `direct_share`.
        """
        if random.Random(seed).random() < self.direct_share:
            return chain_sum_direct(expression)
        return chain_sum_full(expression)

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Return 1 if `answer` equals the number in `entry["answer"]`, else 0.

        Signs, commas and decimals are understood: `+01,000.00` equals 1000.
        """
        try:
            return float(Decimal(answer.replace(",", "")) == Decimal(entry["answer"]))
        except InvalidOperation:
            return 0.0


def chain_sum_steps(expression: str) -> tuple[list[int], list[str]]:
    """Return a sum's running totals and its steps; for `4 - 1 + 2`: ([4, 3, 5], ["-1", "+2"]).

    Raises:
        ValueError: If `expression` is not a chain of additions and subtractions.
    """
    compact = expression.replace(" ", "")
    if _CHAIN.fullmatch(compact) is None:
        raise ValueError(f"{expression!r} is not a chain of sums")
    numbers = re.findall(r"[+-]?\d+", compact)
    steps = [f"{number[0]}{int(number[1:])}" for number in numbers[1:]]
    return list(itertools.accumulate(map(int, numbers))), steps


def chain_sum_full(expression: str) -> str:
    """Return a worked answer with every step of the sum `expression`, such as `4-1=3;3+2=5#5`."""
    totals, steps = chain_sum_steps(expression)
    written = [
        f"{before}{step}={after}"
        for before, step, after in zip(totals, steps, totals[1:], strict=False)
    ]
    return f"{STEP_SEPARATOR.join(written)}{ANSWER_MARKER}{totals[-1]}"


def chain_sum_direct(expression: str) -> str:
    """Return a worked answer with only the result of the sum `expression`, such as `#5`."""
    return f"{ANSWER_MARKER}{chain_sum_steps(expression)[0][-1]}"

"""Rewards that compare a response with the row's answer: `exact`, `regex`, `math`.

The reward `task` is what the task itself scores with.
"""

import logging
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from pydantic import Field, field_validator

from megatron_async.config.base import Settings
from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import UserError
from megatron_async.scoring.rewards.sample import Returned, Sample
from megatron_async.tasks.answers import final_answer

_MARKER = (
    "The answer is what follows its last occurrence; empty: the last `<answer>...</answer>`, "
    "else the last \\boxed{...}, else the whole text."
)


class Exact(Settings):
    """1 when the response's final answer is the row's text, runs of blanks aside."""

    answer_marker: str = Field("", description=_MARKER)
    ignore_case: bool = False
    """`A` and `a` are the same."""

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """The reward."""
        return lambda sample: _compared(self._equal, sample, self.answer_marker)

    def _equal(self, reference: str, answer: str) -> bool:
        if self.ignore_case:
            reference, answer = reference.casefold(), answer.casefold()
        return exactly_equal(reference, answer)


class Math(Settings):
    """1 when math-verify takes the response's final answer and the row's for equal."""

    answer_marker: str = Field("", description=_MARKER)

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """The reward. On hostile input it hangs: it runs under the limit of a scorer process."""
        return lambda sample: _compared(mathematically_equal, sample, self.answer_marker)


class Regex(Settings):
    """1 when the pattern is found; with a group `answer`, when its last match is the row's."""

    pattern: str
    """Python's `re`; `.` is any character, `^` begins a line."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
        return value

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """The reward."""
        pattern = re.compile(self.pattern, re.DOTALL | re.MULTILINE)

        def score(sample: Sample) -> Returned:
            found = None
            for found in pattern.finditer(sample.response):  # noqa: B007 - the last one is kept
                pass
            if found is None or "answer" not in pattern.groupindex:
                return float(found is not None)
            given = found["answer"]
            return float(given is not None and exactly_equal(sample.answer, given))

        return score


def _compared(equal: Callable[[str, str], bool], sample: Sample, marker: str) -> Returned:
    if not sample.answer.strip():
        raise ValueError("the row has no answer to compare with")
    answer = final_answer(sample.response, marker)
    score = float(answer is not None and equal(sample.answer, answer))
    return score, {"score": score, "answered": float(answer is not None)}


def exactly_equal(reference: str, answer: str) -> bool:
    """The same text, runs of blanks aside."""
    return " ".join(reference.split()) == " ".join(answer.split())


def mathematically_equal(reference: str, answer: str) -> bool:
    """Equal to math-verify, without its own limit (it needs `signal.alarm` of a main thread)."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of having no limit
    if exactly_equal(reference, answer):
        return True
    # In dollars both are read as LaTeX; a bare number is found either way.
    gold, given = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return bool(verify(gold, given, timeout_seconds=None))


_CHECKERS: Final[Mapping[str, type[Exact | Math]]] = MappingProxyType(
    {"exact": Exact, "math": Math}
)


class TaskReward(Settings):
    """The procedural task's own scorer; for a file the checker that `task.name` names."""

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """The reward. Raises UserError."""
        task = settings.task
        if task.kind not in ("chain_sum", "reasoning_gym"):
            if task.name not in _CHECKERS:
                raise UserError(
                    f"task.name is {task.name!r}, which cannot score rows of a file: set it to "
                    f"{' or '.join(_CHECKERS)}, which compare a response with the column `answer`, "
                    "or set `reward`"
                )
            checker = _CHECKERS[task.name](answer_marker=task.answer_marker)
            return checker.build_scorer(settings, limit_seconds)
        from megatron_async.tasks.procedural import ProceduralScorer

        scorer = ProceduralScorer(task)
        return lambda sample: scorer.score(sample.payload, sample.response)

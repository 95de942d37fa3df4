"""Provides the rewards that compare a response with the row's answer: `exact`, `regex`, `math`.

It also provides the reward `task`, the scorer of the task itself.
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
    "The final answer is the text after the last occurrence of this marker. Empty: the answer is "
    "the last `<answer>...</answer>`, else the last \\boxed{...}, else the text after `</think>`."
)


class Exact(Settings):
    """Scores 1 if the response's final answer equals the row's answer as text, else 0.

    The amount of white space between words does not matter.
    """

    answer_marker: str = Field("", description=_MARKER)
    ignore_case: bool = False
    """Whether upper and lower case letters are equal."""

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """Return a function that scores a sample: 1 if its final answer equals the row's text."""
        return lambda sample: _compared(self._equal, sample, self.answer_marker)

    def _equal(self, reference: str, answer: str) -> bool:
        """Return whether two answers are the same text, apart from case if `ignore_case` is set."""
        if self.ignore_case:
            reference, answer = reference.casefold(), answer.casefold()
        return exactly_equal(reference, answer)


class Math(Settings):
    """Scores 1 if math-verify finds the response's final answer equal to the row's, else 0."""

    answer_marker: str = Field("", description=_MARKER)

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """Return a function that scores a sample: 1 if its answer equals the row's as mathematics.

        The function can hang on hostile input. It relies on the time limit of its scorer process.
        """
        return lambda sample: _compared(mathematically_equal, sample, self.answer_marker)


class Regex(Settings):
    """Scores 1 if a regular expression matches somewhere in the response, else 0.

    If the expression has a group named `answer`, the group's text in the last match must also equal
    the row's answer.
    """

    pattern: str
    """Regular expression of Python's `re`. `.` matches any character, also a line break; `^` and
    `$` match at the start and end of each line."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        """Return the pattern unchanged; raise ValueError if it is not a regular expression."""
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
        return value

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """Return a function that scores a sample: 1 if the pattern matches its response, else 0."""
        pattern = re.compile(self.pattern, re.DOTALL | re.MULTILINE)

        def score(sample: Sample) -> Returned:
            """Return 1 if the pattern matches and its group `answer`, if any, is right, else 0."""
            found = None
            for found in pattern.finditer(sample.response):  # noqa: B007 - finds the last match
                pass
            if found is None or "answer" not in pattern.groupindex:
                return float(found is not None)
            answer = found["answer"]
            return float(answer is not None and exactly_equal(sample.answer, answer))

        return score


def _compared(equal: Callable[[str, str], bool], sample: Sample, marker: str) -> Returned:
    """Compare the response's final answer with the row's answer; return score and components.

    The score is 1 if they are equal, else 0. The components are `score`, the same number, and
    `answered`, 1 if the response has a final answer.

    Args:
        equal: Compares the row's answer with the response's final answer.
        sample: The response and the row.
        marker: Text before the final answer; empty for the default forms of an answer.

    Raises:
        ValueError: If the row has no answer.
    """
    if not sample.answer.strip():
        raise ValueError("the row's answer is empty; this reward needs an answer to compare with")
    answer = final_answer(sample.response, marker)
    score = float(answer is not None and equal(sample.answer, answer))
    return score, {"score": score, "answered": float(answer is not None)}


def exactly_equal(reference: str, answer: str) -> bool:
    """Return whether two texts are equal, except for the amount of white space between words."""
    return " ".join(reference.split()) == " ".join(answer.split())


def mathematically_equal(reference: str, answer: str) -> bool:
    """Return whether math-verify finds two mathematical expressions equal.

    There is no time limit in this function, because math-verify's own limit uses `signal.alarm`,
    which works only in a main thread. The scorer process limits the time of a score instead.
    """
    from math_verify import parse, verify

    # Without a time limit, math_verify logs warnings; hide them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if exactly_equal(reference, answer):
        return True
    # Between dollar signs, math-verify reads a text as LaTeX. It finds a bare number there too.
    gold, found = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return bool(verify(gold, found, timeout_seconds=None))


_CHECKERS: Final[Mapping[str, type[Exact | Math]]] = MappingProxyType(
    {"exact": Exact, "math": Math}
)


class TaskReward(Settings):
    """Scores with the scorer that belongs to the task, which depends on the kind of task."""

    def build_scorer(
        self, settings: ScorerSettings, limit_seconds: float
    ) -> Callable[[Sample], Returned]:
        """Return a function that scores one sample with the scorer of the task.

        A procedural task (`chain_sum` or `reasoning_gym`) has its own scorer. For rows of a file,
        `task.name` names the reward to score with: `exact` or `math`.

        Raises:
            UserError: If the task's rows are from a file and `task.name` is neither `exact` nor
                `math`.
        """
        task = settings.task
        if task.kind not in ("chain_sum", "reasoning_gym"):
            if task.name not in _CHECKERS:
                raise UserError(
                    f"task.name is {task.name!r}, which cannot score rows of a file. Set it to "
                    f"{' or '.join(_CHECKERS)}, which compare a response with the column `answer`, "
                    "or set `reward`."
                )
            checker = _CHECKERS[task.name](answer_marker=task.answer_marker)
            return checker.build_scorer(settings, limit_seconds)
        from megatron_async.tasks.procedural import ProceduralScorer

        scorer = ProceduralScorer(task)
        return lambda sample: scorer.score(sample.payload, sample.response)

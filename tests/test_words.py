"""The language of the repository stays within the counts that CONTRIBUTING.md promises."""

from __future__ import annotations

import pytest

from tests.words import all_openings, all_replaced_words, openings, replaced_words

# Lower them when the counts have fallen; raising one is a decision.
MOST_OPENINGS = 0
MOST_REPLACED_WORDS = 0


def test_a_docstring_that_opens_in_mid_thought_is_counted() -> None:
    assert [place.line for place in openings('"""Whether it is."""\n')] == [1]
    assert len(list(openings('"""Raises OSError."""\n'))) == 1
    assert len(list(openings('"""Return it, and\n\nmore."""\n'))) == 1
    assert not list(openings('"""Return whether it is. Raises OSError."""\n'))


@pytest.mark.parametrize(
    "line",
    [
        "# it says so",
        "Nobody is to blame.",
        "def test_the_error_is_told() -> None:",
        "class JudgeOfAll:",
        "self._verdict = outcome",
        "SAID = 1",
        "along the surviving line",
        "batch 4 of line 1 came with lag 2",
        'f"batch {batch.step} of line {batch.lineage}"',
        "from where the lines part",
        "the trainer of lineage 0 has been replaced",
        "N' is probed again",
        "MEET_SECONDS = 600.0",
        "task: {verifier_workers: 8}",
        'detail["verifier_error"]',
        "class MathVerifier:",
    ],
)
def test_a_replaced_word_counts_in_prose_and_as_part_of_a_name(line: str) -> None:
    assert len(list(replaced_words(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "an essay about storage",
        "drop_reason = 'verifier'",
        'name: judge, "eval/failed_judgements", log.tell()',
        "a line of text, the message, a page",
        'raise UserError(f"{path}: line {number} is no JSON")',
        "the probe of an engine, replaced by zeros",
    ],
)
def test_other_words_and_the_exceptions_do_not_count(line: str) -> None:
    assert len(list(replaced_words(line))) == 0


def test_few_docstrings_open_in_mid_thought() -> None:
    assert len(found := all_openings()) <= MOST_OPENINGS, "\n".join(map(str, found))


def test_few_words_stand_that_the_glossary_replaces() -> None:
    assert len(found := all_replaced_words()) <= MOST_REPLACED_WORDS, "\n".join(map(str, found))

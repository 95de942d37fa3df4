"""Rows of seeds: the same at every start, and never on both sides."""

import pytest

from megatron_async.config import build_config
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.build import build_source


def test_rows_are_seeds_and_none_is_on_both_sides() -> None:
    source = build_source(TaskConfig(kind="seeds", heldout_share=0.3))
    again = build_source(TaskConfig(kind="seeds", heldout_share=0.3))
    train = [source.train(index) for index in range(300)]
    heldout = source.heldout(100)
    assert [again.train(index) for index in range(300)] == train
    assert again.heldout(100) == heldout
    seeds = [{problem.payload["metadata"]["seed"] for problem in side} for side in (train, heldout)]
    assert len(seeds[0]) == 300
    assert len(seeds[1]) == 100
    assert not seeds[0] & seeds[1]
    assert source.counts(7) == (None, 7)


def test_seeds_have_no_end() -> None:
    with pytest.raises(UserError, match="has no end of them"):
        build_source(TaskConfig(kind="seeds")).heldout(0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"task": {"kind": "seeds"}}, "set environment.name"),
        ({"environment": {"name": "Guess"}}, "environment.name is 'Guess'; it must be"),
        ({"episode": {"max_turns": 3}}, "episode.max_turns is set and"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_config(settings)

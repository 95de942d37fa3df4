"""Rounds in which dynamic sampling keeps no group are counted; too many in a row end the run."""

from __future__ import annotations

import pytest

from megatron_async.rollout import admission
from megatron_async.rollout.admission import FilteredRounds


def test_rounds_that_are_filtered_whole_are_counted_until_a_group_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_FILTERED_ROUNDS", 3)
    rounds = FilteredRounds(4)
    assert [rounds.dropped(0) for _ in range(4)] == [False, False, False, True]
    assert [rounds.dropped(0) for _ in range(4)] == [False] * 4, "named once"
    assert not rounds.hopeless
    assert [rounds.dropped(1) for _ in range(4)] == [False, False, False, True]
    for _ in range(8):
        rounds.dropped(1)
    assert rounds.hopeless
    rounds.emitted()
    assert not rounds.hopeless
    for _ in range(12):
        rounds.dropped(0)
    assert rounds.hopeless
    assert "dropped the last 12 responses (3 batches' worth)" in rounds.sentence()

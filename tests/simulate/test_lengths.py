"""Response lengths: distributions, correlation, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_async.config.simulate import LengthConfig, SimulatedRewardConfig
from megatron_async.errors import UserError
from megatron_async.simulate.lengths import GroupSource, read_lengths


def draw(config: LengthConfig, groups: int = 2000, longest: int = 10**7) -> np.ndarray:
    """Lengths, [groups, 8]."""
    source = GroupSource(config, SimulatedRewardConfig(), group_size=8, longest=longest, seed=3)
    return np.array([source.group(number)[0] for number in range(groups)], dtype=float)


def test_uniform_lengths_reach_from_one_to_the_scale() -> None:
    lengths = draw(LengthConfig(distribution="uniform", scale=1000), longest=8192)
    assert lengths.min() <= 3 and 998 <= lengths.max() <= 1000
    assert lengths.mean() == pytest.approx(500, rel=0.05)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.8])
def test_members_of_a_prompt_are_correlated(correlation: float) -> None:
    logs = np.log(draw(LengthConfig(median=3000, prompt_correlation=correlation)))
    found = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    assert found == pytest.approx(correlation, abs=0.07)


def test_lengths_are_cut_at_the_limit() -> None:
    lengths = draw(LengthConfig(median=3000, sigma=1.5), longest=5000)
    assert lengths.max() == 5000 and lengths.min() >= 1


def test_a_group_is_the_same_whatever_was_asked_before() -> None:
    def source() -> GroupSource:
        return GroupSource(
            LengthConfig(), SimulatedRewardConfig(), group_size=4, longest=999, seed=1
        )

    forward, jumping = source(), source()
    wanted = [forward.group(number) for number in range(3000)]
    for number in (2999, 0, 1500, 0):
        assert jumping.group(number) == wanted[number]


def test_recorded_lengths_keep_their_distribution(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    recorded = [10, 10, 20, 4000]
    path.write_text("".join(json.dumps({"response_length": n}) + "\n" for n in recorded))
    lengths = draw(LengthConfig(distribution="file", path=str(path)))
    shares = {n: float(np.mean(lengths == n)) for n in (10, 20, 4000)}
    assert shares == pytest.approx({10: 0.5, 20: 0.25, 4000: 0.25}, abs=0.03)


SEGMENTS = [
    {"token_ids": [1, 2, 3], "from_environment": False},
    {"token_ids": [9, 9, 9, 9], "from_environment": True},
    {"token_ids": [4, 5], "from_environment": False},
]


@pytest.mark.parametrize(
    "text",
    [
        "[5, 6]",
        "5\n6\n",
        '{"response_ids": [1, 1, 1, 1, 1]}\n6',
        json.dumps({"segments": SEGMENTS, "finish_reason": "length"}) + "\n6",
        '{"response_length": 5}\n{"response_length": 7, "finish_reason": null}\n6',
        '5\n6\n{"segments": [], "finish_reason": null}',
    ],
)
def test_every_form_of_a_length_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path).tolist() == [5, 6]


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", '{"other": 1}', "five", "NaN", "true", '{"segments": [1]}'),
        '{"segments": [], "finish_reason": "stop"}',
        '{"response_length": 7, "finish_reason": null}',
    ],
)
def test_a_bad_length_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(UserError, match=r"simulate\.lengths\.path"):
        read_lengths(path)


def test_rewards_follow_the_prompt() -> None:
    reward = SimulatedRewardConfig(success_alpha=2, success_beta=6)
    source = GroupSource(LengthConfig(), reward, group_size=8, longest=999, seed=1)
    rewards = np.array([source.group(number)[1] for number in range(1000)])
    assert rewards.mean() == pytest.approx(0.25, abs=0.03)
    assert rewards.mean(axis=1).std() > 1.3 * np.sqrt(0.25 * 0.75 / 8)

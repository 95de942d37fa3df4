"""Tests of how response lengths are drawn, read and fitted (against scipy and a run's export)."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.config import build_config
from megatron_async.config.rollout import StoreConfig
from megatron_async.config.simulate import LengthConfig, SimulatedRewardConfig
from megatron_async.errors import UserError
from megatron_async.run_directory import RunDirectory
from megatron_async.simulate.lengths import (
    Fit,
    GroupSource,
    Recorded,
    fit_lengths,
    read_lengths,
    read_recorded,
)
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import DropReason, FinishReason
from tests.report.test_report import make_run
from tests.trajectory.builders import append, prompt

TRUE = {
    "lognormal": LengthConfig(median=3000, sigma=0.8, prompt_correlation=0),
    "weibull": LengthConfig(distribution="weibull", scale=3500, shape=0.8, prompt_correlation=0),
}


def drawn(family: str, limit: int = 10**7) -> Recorded:
    """Draw 20,000 responses as the simulator does, cut at `limit`."""
    source = GroupSource(TRUE[family], SimulatedRewardConfig(), group_size=8, longest=limit, seed=5)
    lengths = np.array([source.group(number)[0] for number in range(2500)], dtype=float).ravel()
    cut = lengths >= limit
    return Recorded(lengths, cut, np.ones_like(cut))


def of(fits: list[Fit], family: str) -> Fit:
    return next(fit for fit in fits if fit.distribution == family)


@pytest.mark.parametrize("limit", [10**7, 8000, 2500])
@pytest.mark.parametrize("family", ["lognormal", "weibull"])
def test_fit_lengths_recovers_drawn_parameters_when_responses_were_cut(
    family: str, limit: int
) -> None:
    """With a limit of 2,500, more than half of the responses are cut."""
    sample = drawn(family, limit)
    best = fit_lengths(sample)[0]
    assert best.distribution == family
    for name, value in best.settings.items():
        assert value == pytest.approx(getattr(TRUE[family], name), rel=0.04), name
    assert best.distance < 0.02


@pytest.mark.parametrize("limit", [10**7, 2500])
def test_fit_lengths_matches_scipy(limit: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    sample = drawn("weibull", limit)
    sample = Recorded(sample.lengths[:2000], sample.censored[:2000], sample.ended[:2000])
    data = stats.CensoredData(
        uncensored=sample.lengths[~sample.censored], right=sample.lengths[sample.censored]
    )
    fits = fit_lengths(sample)
    sigma, _, median = stats.lognorm.fit(data, floc=0)
    assert of(fits, "lognormal").settings == pytest.approx(
        {"median": median, "sigma": sigma}, rel=1e-3
    )
    shape, _, scale = stats.weibull_min.fit(data, floc=0)
    weibull = of(fits, "weibull")
    assert weibull.settings == pytest.approx({"scale": scale, "shape": shape}, rel=1e-3)
    likelihood = -stats.weibull_min.nnlf((shape, 0, scale), sample.lengths[~sample.censored])
    survival = stats.weibull_min.logsf(sample.lengths[sample.censored], shape, 0, scale)
    assert weibull.log_likelihood == pytest.approx(likelihood + survival.sum(), rel=1e-6)


def test_fit_distance_matches_kolmogorov_smirnov_when_nothing_was_cut() -> None:
    stats = pytest.importorskip("scipy.stats")
    sample = drawn("lognormal")
    fit = of(fit_lengths(sample), "lognormal")
    frozen = stats.lognorm(fit.settings["sigma"], 0, fit.settings["median"])
    assert fit.distance == pytest.approx(stats.kstest(sample.lengths, frozen.cdf).statistic)


@pytest.mark.parametrize(
    ("lengths", "cut", "sentence"),
    [
        ([5.0] * 40, 0, r"all 40 responses that ended without being cut have 5 tokens"),
        ([float(n) for n in range(5, 25)], 11, r"9 of 20 responses .*; at least 10"),
    ],
)
def test_fit_lengths_refuses_a_sample_without_a_fit(
    lengths: list[float], cut: int, sentence: str
) -> None:
    censored = np.arange(len(lengths)) >= len(lengths) - cut
    with pytest.raises(UserError, match=sentence):
        fit_lengths(Recorded(np.array(lengths), censored, np.ones_like(censored)))


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Write the export of 30 responses of 10 to 39 tokens, the longest ten cut, and of two
    trajectories dropped before they ended."""

    async def scenario() -> None:
        store = TrajectoryStore.open(
            tmp_path / "trajectories.sqlite", StoreConfig(compact_after_checkpoints=1)
        )
        group = store.add_group(prompt(), 30)
        for trajectory in group.trajectories:
            i = trajectory.trajectory_id
            store.begin_request(i)
            append(store, i, 0, 10 + i)
            store.end(i, FinishReason.LENGTH if i >= 20 else FinishReason.STOP)
            await store.sync()
            await store.set_reward(i, 1.0)
        store.mark_batched([group.group_id], 0)
        half, none = store.add_group(prompt(), 2).trajectories
        store.begin_request(half.trajectory_id)
        append(store, half.trajectory_id, 0, 77)
        for trajectory in (half, none):
            store.drop(trajectory.trajectory_id, DropReason.STALE)
        await store.checkpoint_finalized(1, [])
        await store.close()

    asyncio.run(scenario())
    return tmp_path / "export" / "trajectories.jsonl"


def test_read_lengths_reads_the_export_of_a_run(export: Path) -> None:
    assert len(export.read_text().splitlines()) == 32
    assert sorted(read_lengths(export)) == list(range(10, 40))
    sample = read_recorded(export, "FILE")
    assert sorted(sample.lengths[sample.censored]) == [*range(30, 40), 77]
    config = LengthConfig(distribution="file", path=str(export))
    source = GroupSource(config, SimulatedRewardConfig(), group_size=8, longest=100, seed=1)
    assert set(source.group(0)[0]) <= set(range(10, 40))


@pytest.mark.parametrize("behind", ['{"segm', '{"response_length": 5, "finish_reason": "stop"}\n'])
def test_read_lengths_ignores_lines_after_the_last_committed_removal(
    export: Path, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    """A running or killed compaction leaves such lines behind the committed ones."""
    with export.open("a") as file:
        file.write(behind)
    assert sorted(read_lengths(export)) == list(range(10, 40))
    monkeypatch.chdir(export.parent)
    assert sorted(read_lengths(Path(export.name))) == list(range(10, 40)), "also by relative path"


def test_read_lengths_names_an_incomplete_line_of_a_copied_export(export: Path) -> None:
    copied = export.with_name("copy.jsonl")
    copied.write_text(export.read_text()[:-10])
    with pytest.raises(UserError, match=rf"{copied}, line 32, is not valid JSON"):
        read_lengths(copied)


def test_read_lengths_keeps_only_lengths_in_memory(tmp_path: Path) -> None:
    """The peak must be below the size of the file; all its numbers would take five times as
    much."""
    file = tmp_path / "long.jsonl"
    line = json.dumps({"response_ids": [100_000] * 5000}) + "\n"
    with file.open("w") as stream:
        stream.writelines(line for _ in range(50))
    tracemalloc.start()
    try:
        assert set(read_lengths(file)) == {5000.0}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < file.stat().st_size


def test_fit_lengths_command_prints_settings_that_simulate_accepts(export: Path) -> None:
    result = CliRunner().invoke(app, ["fit-lengths", str(export)])
    assert result.exit_code == 0, result.output
    assert "31 responses of 10 to 77 tokens; 11 of them would have been longer" in result.output
    assert "lognormal: median " in result.output
    assert "weibull: scale " in result.output
    printed = result.output.splitlines()[-1].replace("--set ", "").split()
    settings = dict(pair.removeprefix("simulate.lengths.").split("=") for pair in printed)
    LengthConfig.model_validate(settings)
    assert settings["distribution"] in ("lognormal", "weibull")


def test_fit_lengths_command_cuts_bare_numbers_at_the_option(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([*range(10, 50), 60, 60, 70]))
    result = CliRunner().invoke(app, ["fit-lengths", str(file), "--cut", "60"])
    assert "43 responses of 10 to 60 tokens; 3 of them would have been longer" in result.output


def test_read_recorded_reads_the_store_when_nothing_was_exported(tmp_path: Path) -> None:
    run = make_run(tmp_path, "short")
    sample = read_recorded(run, "FILE")
    assert sample.lengths.tolist() == [4.0] and sample.ended.tolist() == [True]
    assert sample.censored.tolist() == [False]
    with pytest.raises(UserError, match=f"exported nothing yet. Name its directory instead: {run}"):
        read_recorded(run / "export" / "trajectories.jsonl", "FILE")
    empty = RunDirectory.create(build_config({"name": "empty", "root": str(tmp_path)}))
    with pytest.raises(UserError, match=r"trajectory store .* does not exist"):
        read_recorded(empty.path, "FILE")


def draw(config: LengthConfig, groups: int = 2000, longest: int = 10**7) -> np.ndarray:
    """Draw response lengths, [groups, 8]."""
    source = GroupSource(config, SimulatedRewardConfig(), group_size=8, longest=longest, seed=3)
    return np.array([source.group(number)[0] for number in range(groups)], dtype=float)


def test_uniform_lengths_reach_from_one_to_the_scale() -> None:
    lengths = draw(LengthConfig(distribution="uniform", scale=1000), longest=8192)
    assert lengths.min() <= 3 and 998 <= lengths.max() <= 1000
    assert lengths.mean() == pytest.approx(500, rel=0.05)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.8])
def test_lengths_of_one_prompt_have_the_configured_correlation(correlation: float) -> None:
    logs = np.log(draw(LengthConfig(median=3000, prompt_correlation=correlation)))
    found = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    assert found == pytest.approx(correlation, abs=0.07)


def test_group_source_cuts_lengths_at_the_limit() -> None:
    lengths = draw(LengthConfig(median=3000, sigma=1.5), longest=5000)
    assert lengths.max() == 5000 and lengths.min() >= 1


def test_group_source_returns_equal_groups_in_any_request_order() -> None:
    def source() -> GroupSource:
        return GroupSource(
            LengthConfig(), SimulatedRewardConfig(), group_size=4, longest=999, seed=1
        )

    forward, jumping = source(), source()
    wanted = [forward.group(number) for number in range(3000)]
    for number in (2999, 0, 1500, 0):
        assert jumping.group(number) == wanted[number]


def test_group_source_keeps_the_distribution_of_recorded_lengths(tmp_path: Path) -> None:
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
def test_read_lengths_accepts_every_form_of_length_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path).tolist() == [5, 6]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        '{"other": 1}',
        "five",
        "NaN",
        "true",
        '{"segments": [1]}',
        '{"segments": [], "finish_reason": "stop"}',
        '{"response_length": 7, "finish_reason": null}',
    ],
)
def test_read_lengths_names_the_setting_when_file_is_invalid(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(UserError, match=r"simulate\.lengths\.path"):
        read_lengths(path)


def test_rewards_depend_on_the_prompt() -> None:
    reward = SimulatedRewardConfig(success_alpha=2, success_beta=6)
    source = GroupSource(LengthConfig(), reward, group_size=8, longest=999, seed=1)
    rewards = np.array([source.group(number)[1] for number in range(1000)])
    assert rewards.mean() == pytest.approx(0.25, abs=0.03)
    assert rewards.mean(axis=1).std() > 1.3 * np.sqrt(0.25 * 0.75 / 8)

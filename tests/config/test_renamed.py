"""Settings under their former names: an old file and an old run go on, and a notice has the new."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async.config import build_config, dump, load_config
from megatron_async.config.load import load_run_config
from megatron_async.config.reference import all_settings
from megatron_async.config.renamed import RENAMED
from megatron_async.config.run import RunConfig
from megatron_async.errors import UserError
from megatron_async.simulate.sweep import read_settings

VALUES: Mapping[str, Any] = {
    "task.verifier_timeout_seconds": 7.5,
    "task.on_verifier_timeout": "drop",
    "task.verifier_workers": 3,
    "simulate.reward.verifier_seconds": 0.75,
}
TODAY = {name: f"{name.rpartition('.')[0]}.{new}" for name, new in RENAMED.items()}


def nested(name: str, value: Any) -> dict[str, Any]:
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def value(config: RunConfig, former: str) -> Any:
    found: Any = config
    for part in TODAY[former].split("."):
        found = getattr(found, part)
    return found


def written(path: Path, *settings: dict[str, Any]) -> Path:
    path.write_text("".join(map(yaml.safe_dump, settings)))
    return path


def test_every_former_name_is_of_a_setting_of_today() -> None:
    names = {setting.name for setting in all_settings()}
    assert set(VALUES) == set(RENAMED)
    assert set(TODAY.values()) <= names and not names & set(RENAMED)


@pytest.mark.parametrize("name", VALUES)
def test_a_file_the_command_line_and_python_may_use_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    given = VALUES[name]
    file = written(tmp_path / "old.yaml", nested(name, given))
    new = written(tmp_path / "new.yaml", nested(TODAY[name], given))
    override = f"{name}={given}"
    assert value(load_config(file), name) == given
    assert load_config(file) == load_config(new) == build_config(nested(name, given))
    bare = written(tmp_path / "bare.yaml", {"steps": 7})
    assert value(load_config(bare, [override]), name) == given
    assert value(build_config(read_settings(bare, [override])), name) == given
    for where in (f"config file {file}", f"override '{override}'"):
        assert f"note: {where}: {name} is called {TODAY[name]}; " in caplog.text


def test_a_resume_of_an_old_run_goes_on_with_its_values_under_the_new_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"task": {"scorer_workers": 3, "on_scorer_timeout": "drop"}}
    before = build_config({**settings, "simulate": {"reward": {"scorer_seconds": 0.75}}})
    text = dump(before)
    for name, new in RENAMED.items():
        assert f"  {new}: " in text
        text = text.replace(f"  {new}:", f"  {name.rpartition('.')[2]}:")
    file = tmp_path / "config.yaml"
    file.write_text(text)
    after = load_run_config(file)
    assert after == before and after.given == before.given
    changed = load_run_config(file, ["task.scorer_workers=5"])
    assert (changed.task.scorer_workers, changed.task.on_scorer_timeout) == (5, "drop")
    assert changed.given["task"] == {"scorer_workers": 5, "on_scorer_timeout": "drop"}
    notices = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(notices) == len(set(notices)) == len(RENAMED), "each once"


@pytest.mark.parametrize("name", VALUES)
def test_both_names_in_one_file_are_refused(tmp_path: Path, name: str) -> None:
    section, _, new = TODAY[name].rpartition(".")
    both = nested(section, {new: VALUES[name], name.rpartition(".")[2]: VALUES[name]})
    file = written(tmp_path / "both.yaml", both)
    with pytest.raises(UserError, match=f"both.yaml: {name} and {TODAY[name]} are both set"):
        load_config(file)


@pytest.mark.parametrize("names", [(0, 1), (1, 0)], ids=["former below", "former above"])
def test_what_is_above_takes_the_place_of_the_other_name_below(
    tmp_path: Path, names: tuple[int, int]
) -> None:
    both = ("task.verifier_workers", "task.scorer_workers")
    low, high = both[names[0]], both[names[1]]
    written(tmp_path / "low.yaml", nested(low, 3))
    file = written(tmp_path / "high.yaml", {"base": "low.yaml"}, nested(high, 4))
    assert load_config(file).task.scorer_workers == 4
    assert load_config(file, [f"{low}=5"]).task.scorer_workers == 5


def test_a_wrong_value_is_refused_under_todays_name(tmp_path: Path) -> None:
    file = written(tmp_path / "old.yaml", nested("task.verifier_workers", 0))
    with pytest.raises(UserError, match=r"task\.scorer_workers is 0: "):
        load_config(file)

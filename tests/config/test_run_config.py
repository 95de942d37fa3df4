"""Tests the config.yaml of a run, which contains resolved values and the explicit settings, so that
a resume can change a preset."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.config import RunConfig, dump, load_config
from megatron_async.config.load import differences, load_run_config
from megatron_async.config.recipes import RECIPES, SCHEDULE_PRESETS
from megatron_async.errors import UserError

SETTINGS = """
name: a
schedule: {groups_per_batch: 16, group_size: 5}
optimizer: {lr: 1.0e-5}
reward: {name: exact, arguments: {a.b: 1, empty: {}}}
"""
OVERRIDES = ["sampling.max_new_tokens=300", "schedule.concurrency=32"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "user.yaml"
    file.write_text(SETTINGS)
    return file


def stored(file: Path, config: RunConfig) -> Path:
    """Write the config.yaml of a run and return its path."""
    path = file.with_name("config.yaml")
    path.write_text(dump(config))
    return path


def test_load_run_config_refuses_a_file_that_no_run_wrote(file: Path) -> None:
    with pytest.raises(
        UserError, match=r"user\.yaml is not the config.* of a run; it lacks `explicit`"
    ):
        load_run_config(file)


@pytest.mark.parametrize("preset", SCHEDULE_PRESETS)
@pytest.mark.parametrize("before", ["copris", "pipeline", "rapid"])
def test_resume_applies_a_new_preset_and_keeps_explicit_settings(
    file: Path, before: str, preset: str
) -> None:
    overrides = [*OVERRIDES, f"schedule.preset={before}"]
    path = stored(file, load_config(file, overrides))
    found = load_run_config(path, [f"schedule.preset={preset}"])
    assert differences(found, load_config(file, [*overrides, f"schedule.preset={preset}"])) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_resume_applies_a_new_recipe_and_keeps_explicit_settings(file: Path, recipe: str) -> None:
    path = stored(file, load_config(file, OVERRIDES))
    found = load_run_config(path, [f"algorithm.recipe={recipe}"])
    assert differences(found, load_config(file, [*OVERRIDES, f"algorithm.recipe={recipe}"])) == []


def test_every_resume_adds_its_overrides_to_the_explicit_settings(file: Path) -> None:
    path = stored(file, load_config(file, OVERRIDES))
    for change in ("schedule.preset=pipeline", "optimizer.lr=2e-5", "algorithm.recipe=grpo"):
        path.write_text(dump(load_run_config(path, [change])))
    found = load_run_config(path)
    assert (found.schedule.preset, found.optimizer.lr) == ("pipeline", 2e-5)
    assert found.algorithm.kl.loss_coef == RECIPES["grpo"]["algorithm"]["kl"]["loss_coef"]
    assert (found.schedule.group_size, found.schedule.concurrency) == (5, 32)
    assert found.reward[0].arguments == {"a.b": 1, "empty": {}}


def test_derived_value_stays_when_the_new_preset_has_no_value_for_it(file: Path) -> None:
    """A value that was derived from the machine is kept at a resume, although no file of the user
    contains it."""
    config = load_config(file)
    engines = config.engines.model_copy(update={"max_total_tokens": 7777})
    path = stored(file, config.model_copy(update={"engines": engines}))
    found = load_run_config(path, ["schedule.preset=pipeline"])
    assert found.engines.max_total_tokens == 7777
    assert found.schedule.overlap


def test_default_value_set_at_a_resume_replaces_the_derived_value(file: Path) -> None:
    config = load_config(file)
    fewer = config.eval.model_copy(update={"prompts": 2})
    path = stored(file, config.model_copy(update={"eval": fewer}))
    found = load_run_config(path, [f"eval.prompts={config.eval.prompts}"])
    assert found.eval.prompts == config.eval.prompts


def test_settings_passed_in_python_are_explicit_in_the_run_config(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump(RunConfig(steps=7)))
    found = load_run_config(path, ["schedule.preset=sync"])
    assert (found.explicit["steps"], found.schedule.boundary) == (7, "drain")


@pytest.mark.parametrize("change", ["explicit=3", "explicit.steps=4", "explicit={}"])
def test_explicit_section_cannot_be_set_as_a_setting(file: Path, change: str) -> None:
    path = stored(file, load_config(file))
    for config_file in (file, path):
        with pytest.raises(UserError, match=r"override .explicit.* names no setting"):
            load_config(config_file, [change])
    file.write_text("explicit: 3")
    with pytest.raises(UserError, match="explicit is 3; it must be a mapping"):
        load_config(file)


def test_run_config_as_base_passes_explicit_settings_but_no_old_preset(file: Path) -> None:
    stored(file, load_config(file, OVERRIDES))
    file.write_text("base: config.yaml\nschedule: {preset: sync}\n")
    found = load_config(file)
    assert (found.schedule.boundary, found.schedule.group_size) == ("drain", 5)


def test_load_config_of_a_run_config_equals_load_run_config(file: Path) -> None:
    path = stored(file, load_config(file, OVERRIDES))
    change = ["schedule.preset=pipeline"]
    assert load_config(path, change) == load_run_config(path, change)

"""Tests the reference of settings: every setting is listed once, and a misspelling gets a
suggestion."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.config import build_config, load_config
from megatron_async.config.reference import (
    all_sections,
    all_settings,
    did_you_mean,
    sections_with,
    shown_value,
    simulation_sections,
)
from megatron_async.errors import UserError
from tests.syntax import parse

ROOT = Path(__file__).parents[2]


def test_all_settings_have_a_type_and_a_description() -> None:
    names = [setting.name for setting in all_settings()]
    assert len(names) == len(set(names)) > 100
    found = {setting.name: setting for setting in all_settings()}
    concurrency = found["schedule.concurrency"]
    assert (concurrency.type, concurrency.default) == ("int or auto", "64")
    assert found["sampling.top_p"].range == "> 0, ≤ 1"
    assert found["schedule.overflow"].type == "block | drop_oldest"
    simulated = [setting for section in simulation_sections() for setting in section.settings]
    assert all(s.description and s.type for s in (*all_settings(), *simulated))


def test_reference_lists_settings_of_list_and_mapping_elements() -> None:
    sections = {section.name: section for section in all_sections()}
    assert sections["engines"].description.startswith("Inference engines")
    for name in ("reward[]", "task.sources[]", "eval.sets[]", "telemetry.trackers[]"):
        assert sections[name].of_items and sections[name].description
        assert all(s.description and s.type for s in sections[name].settings)
    assert "reward[].weight" in CliRunner().invoke(app, ["settings", "reward"]).output


def test_reference_default_equals_the_value_of_an_empty_config() -> None:
    values = build_config({}).model_dump()
    assert values["schedule"]["concurrency"] == 1024, (
        "the default must be the recipe's, not the model's 64"
    )
    shown = CliRunner().invoke(app, ["settings", "schedule"]).output
    assert "schedule.concurrency  int or auto, default 1024 (the recipe's)" in shown
    assert "schedule.group_size  int (≥ 1), default 8\n" in re.sub(" +\n", "\n", shown)
    for section in sections_with(values):
        has_no_values = section.of_items or section in simulation_sections()
        for setting in () if has_no_values else section.settings:
            assert setting.default == shown_value(setting.value_in(values)), setting.name


@pytest.mark.parametrize(
    ("unknown", "suggested"),
    [
        ("schedule.concurency", "schedule.concurrency"),
        ("scheduler.concurrency", "schedule.concurrency"),
        ("lr", "optimizer.lr or sft.optimizer.lr"),
        ("engine", "engines"),
        ("trainer.recompute_activations", "trainer.recompute"),
        ("optimizer.learning_rate", ""),
    ],
)
def test_did_you_mean_suggests_the_setting_for_a_misspelling(unknown: str, suggested: str) -> None:
    assert did_you_mean(unknown) == (f"; did you mean {suggested}?" if suggested else "")


def test_settings_command_shows_a_section_with_the_values_of_a_file() -> None:
    file = ROOT / "configs" / "quickstart.yaml"
    shown = CliRunner().invoke(app, ["settings", "schedule", "--of", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "schedule.concurrency  int or auto, default 1024 (the recipe's)  = 96" in shown.output
    assert "engines.count" not in shown.output
    assert load_config(file).schedule.concurrency == 96
    assert "schedule.group_size" in CliRunner().invoke(app, ["settings"]).output


def test_settings_command_shows_the_settings_of_the_simulator() -> None:
    file = ROOT / "configs" / "quickstart.yaml"
    shown = CliRunner().invoke(app, ["settings", "simulate.gpu", "--of", str(file)])
    assert "simulate.gpu.name  A100 | H100" in shown.output and "engines.count" not in shown.output


def test_settings_command_refuses_an_unknown_section() -> None:
    refused = CliRunner().invoke(app, ["settings", "scedule"])
    assert isinstance(refused.exception, UserError)
    assert str(refused.exception).endswith("did you mean schedule?")


def texts_of_package() -> list[tuple[str, str]]:
    """Return (file name, text) of the one-line strings of the package; docstrings of several lines
    also name modules and are left out."""
    return [
        (file.name, node.value)
        for file in (ROOT / "megatron_async").rglob("*.py")
        if file.name != "__init__.py"
        for node in ast.walk(parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if "\n" not in node.value
    ]


def test_messages_name_only_settings_that_exist() -> None:
    known = [*all_settings(), *(s for section in simulation_sections() for s in section.settings)]
    settings = {setting.name for setting in known}
    sections = {setting.section for setting in known} - {""}
    tops = "|".join(sorted({section.split(".")[0] for section in sections} - {"model"}))
    named = re.compile(rf"(?<![\w./`{{])((?:{tops})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w/(]|\.py)")
    wrong = {
        f"{file}: {name}"
        for file, text in texts_of_package()
        for name in named.findall(text)
        if name not in settings | sections and not name.startswith("task.params.")
        if not name.endswith((".py", ".yaml", ".json", ".sqlite", ".log"))
    }
    assert not wrong


def test_messages_name_only_commands_that_exist() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = re.compile(r"`?megatron-async ([a-z]+(?:-[a-z]+)?)")
    wrong = {
        f"{file}: {name}"
        for file, text in texts_of_package()
        for name in named.findall(text)
        if name not in commands
    }
    assert not wrong

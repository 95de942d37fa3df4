"""`megatron-async settings [SECTION] [--of FILE]`: what can be set, and what a run of a file
would use here: settings that nobody has set follow from the machine (`launcher.derived`) and the
data (`launcher.preflight`)."""

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from megatron_async.config.load import build_config, load_config
from megatron_async.config.reference import Setting, did_you_mean, sections_with, shown_value
from megatron_async.errors import UserError
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.preflight import check_run_leniently


def settings_command(section: str, file: Path | None, overrides: Sequence[str]) -> None:
    """Print the settings of a section (of all), with the values of `file`. Raises UserError."""
    every = sections_with(build_config({}).model_dump())
    wanted = [
        (part, shown)
        for part in every
        if (shown := [s for s in part.settings if _within(s.name, section)])
    ]
    if not wanted:
        sections = ", ".join(dict.fromkeys(part.name.split(".")[0] for part in every[1:]))
        near = did_you_mean(section) or f"; the sections are {sections}"
        raise UserError(f"there is no section or setting {section!r}{near}")
    checked, dumped = None, None
    if file is not None:
        config = load_config(file, overrides)
        checked = check_run_leniently(derive(config, Machine.here(config)).config)
        dumped = checked.config.model_dump(mode="json")
    console = Console(soft_wrap=False)
    for part, shown in wanted:
        console.print(
            Text(part.name or "top level", style="bold"), Text(part.description), sep="\n"
        )
        for setting in shown:
            apart = part.of_items or part.name.startswith("simulate")
            console.print(_head(setting, None if apart else dumped), highlight=False)
            console.print(Padding(Text(setting.description), (0, 0, 0, 6)))
        typer.echo()
    for notice in checked.notices if checked is not None else ():
        console.print(f"note: {notice}", markup=False, highlight=False)


def _within(name: str, section: str) -> bool:
    return not section or name == section or name.startswith((f"{section}.", f"{section}[]."))


def _head(setting: Setting, dumped: dict[str, object] | None) -> Text:
    """`name  type  default, range`, and the value in the file."""
    limits = f" ({setting.range})" if setting.range else ""
    text = Text.assemble(
        "  ",
        (setting.name, "bold cyan"),
        f"  {setting.type}{limits}, default {setting.default}{setting.source}",
    )
    if dumped is not None:
        value = shown_value(setting.value_in(dumped))
        text.append(f"  = {value}", "bold" if value != setting.default else "")
    return text

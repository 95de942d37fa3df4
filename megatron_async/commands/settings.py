"""`megatron-async settings [SECTION] [--of FILE]`: prints settings and their values in a file.

With a file, it prints the values that a run of the file would use on this machine. Settings that
nobody has set may have values that are derived from the machine (`launcher.derived`) and the data
(`launcher.preflight`).
"""

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
    """Print the settings of `section`, or of all sections if it is empty. With `file`, print their
    values too.

    Raises:
        UserError: There is no such section or setting, or the file is not valid.
    """
    every = sections_with(build_config({}).model_dump())
    chosen = [
        (group, matching)
        for group in every
        if (matching := [s for s in group.settings if _within(s.name, section)])
    ]
    if not chosen:
        sections = ", ".join(dict.fromkeys(group.name.split(".")[0] for group in every[1:]))
        near = did_you_mean(section) or f"; the sections are {sections}"
        raise UserError(f"no section or setting is named {section!r}{near}")
    checked, dumped = None, None
    if file is not None:
        config = load_config(file, overrides)
        checked = check_run_leniently(derive(config, Machine.here(config)).config)
        dumped = checked.config.model_dump(mode="json")
    console = Console(soft_wrap=False)
    for group, matching in chosen:
        console.print(
            Text(group.name or "top level", style="bold"), Text(group.description), sep="\n"
        )
        for setting in matching:
            without_value = group.of_items or group.name.startswith("simulate")
            console.print(_head(setting, None if without_value else dumped), highlight=False)
            console.print(Padding(Text(setting.description), (0, 0, 0, 6)))
        typer.echo()
    for notice in checked.notices if checked is not None else ():
        console.print(f"note: {notice}", markup=False, highlight=False)


def _within(name: str, section: str) -> bool:
    """Return whether the setting `name` is `section` itself or is in it. Every setting is in the
    empty section."""
    return not section or name == section or name.startswith((f"{section}.", f"{section}[]."))


def _head(setting: Setting, dumped: dict[str, object] | None) -> Text:
    """Return a line with a setting's name, type, range and default. With `dumped`, the nested
    mapping of the settings of a file, it also has the value in the file."""
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

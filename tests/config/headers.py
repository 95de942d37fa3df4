"""Reads and writes the figures in the headers of shipped config files, which `megatron-async
simulate --figures` prints.

    python -m tests.config.headers          writes the figures into every file that states figures

The command is `megatron-async simulate --figures --config FILE`. The header may add overrides to
the command, for example another GPU.
"""

from __future__ import annotations

import contextlib
import io
from itertools import takewhile
from pathlib import Path

from megatron_async.commands.simulate import figures_command
from megatron_async.config.load import load_simulation
from megatron_async.config.simulate import SimulationConfig

CONFIGS = Path(__file__).parents[2] / "configs"
TITLE = "# Arithmetic, nothing measured: megatron-async simulate --figures --config configs/{}.yaml"
_INDENT = "#   "


def _title(name: str) -> str:
    """Return the header line of a file that names the command, or an empty string if the header has
    none."""
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    return next((line for line in lines if line.startswith(TITLE.format(name))), "")


def overrides(name: str) -> list[str]:
    """Return the overrides of the command in the header of a file."""
    return _title(name).removeprefix(TITLE.format(name)).split()


def simulation(name: str) -> SimulationConfig:
    """Return the simulation config of a shipped file, with the overrides of its header."""
    return load_simulation(CONFIGS / f"{name}.yaml", overrides(name))


def stated(name: str) -> list[str]:
    """Return the figures in the header of a file, line by line."""
    _, _, after = (CONFIGS / f"{name}.yaml").read_text().partition(_title(name) + "\n")
    figures = takewhile(lambda line: line.startswith(_INDENT), after.splitlines())
    return [line.removeprefix(_INDENT) for line in figures]


def printed(name: str) -> list[str]:
    """Return the lines that the command of the header prints for a file."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        figures_command(CONFIGS / f"{name}.yaml", overrides(name))
    return out.getvalue().splitlines()


def with_figures() -> list[str]:
    """Return the names of the files whose header states figures."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml") if _title(path.stem))


def main() -> None:
    for name in with_figures():
        path = CONFIGS / f"{name}.yaml"
        lines = path.read_text().splitlines()
        first = lines.index(_title(name)) + 1
        last = first
        while lines[last].startswith(_INDENT):
            last += 1
        lines[first:last] = [_INDENT + line for line in printed(name)]
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""The figures in the headers of shipped files: what stands there, and what the command prints.

    python -m tests.config.headers          writes them into every file that has some

`megatron-async simulate --figures --config FILE` prints them. Overrides behind it, such as another
GPU, are those of the file's header.
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
    """The line of a file's header that names the command; empty where there is none."""
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    return next((line for line in lines if line.startswith(TITLE.format(name))), "")


def overrides(name: str) -> list[str]:
    """What the command in the header of a file sets."""
    return _title(name).removeprefix(TITLE.format(name)).split()


def simulation(name: str) -> SimulationConfig:
    """The simulation of a shipped file, with the overrides of its header."""
    return load_simulation(CONFIGS / f"{name}.yaml", overrides(name))


def stated(name: str) -> list[str]:
    """The figures in the header of a file."""
    _, _, after = (CONFIGS / f"{name}.yaml").read_text().partition(_title(name) + "\n")
    figures = takewhile(lambda line: line.startswith(_INDENT), after.splitlines())
    return [line.removeprefix(_INDENT) for line in figures]


def printed(name: str) -> list[str]:
    """What the command prints of it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        figures_command(CONFIGS / f"{name}.yaml", overrides(name))
    return out.getvalue().splitlines()


def with_figures() -> list[str]:
    """Names of the files that state figures."""
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

"""The figures in the headers of shipped files: what stands there, and what the command prints.

    python -m tests.config.headers          writes them into every file that has some

`megatron-async simulate --figures --config FILE` prints them.
"""

from __future__ import annotations

import contextlib
import io
from itertools import takewhile
from pathlib import Path

from megatron_async.commands.simulate import figures_command

CONFIGS = Path(__file__).parents[2] / "configs"
TITLE = "# Arithmetic, nothing measured: megatron-async simulate --figures --config configs/{}.yaml"
_INDENT = "#   "


def stated(name: str) -> list[str]:
    """The figures in the header of a file."""
    _, _, after = (CONFIGS / f"{name}.yaml").read_text().partition(TITLE.format(name) + "\n")
    figures = takewhile(lambda line: line.startswith(_INDENT), after.splitlines())
    return [line.removeprefix(_INDENT) for line in figures]


def printed(name: str) -> list[str]:
    """What the command prints of it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        figures_command(CONFIGS / f"{name}.yaml", [])
    return out.getvalue().splitlines()


def with_figures() -> list[str]:
    """Names of the files that state figures."""
    titled = {path.stem: path.read_text() for path in CONFIGS.glob("*.yaml")}
    return sorted(name for name, text in titled.items() if TITLE.format(name) in text)


def main() -> None:
    for name in with_figures():
        path = CONFIGS / f"{name}.yaml"
        lines = path.read_text().splitlines()
        first = lines.index(TITLE.format(name)) + 1
        last = first
        while lines[last].startswith(_INDENT):
            last += 1
        lines[first:last] = [_INDENT + line for line in printed(name)]
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

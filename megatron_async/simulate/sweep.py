"""`megatron-async simulate`: one configuration, several presets, or a cartesian sweep.

Precedence is that of a run: recipe < preset < file < `--set` < `--presets` < `--sweep`. So a preset
given by `--presets` does not override what the file sets of the schedule itself.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.config.load import build_simulation, merge, parse_override
from megatron_async.config.recipes import SCHEDULE_PRESETS
from megatron_async.config.simulate import SimulationConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.simulate.build import simulate
from megatron_async.simulate.statistics import Summary

Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """A simulated configuration: `labels` hold how it differs from the others."""

    labels: Overrides
    config: SimulationConfig
    summary: Summary


def parse_sweep(text: str) -> list[str]:
    """`a.b=1,2,3` to one override for each value. Raises UserError."""
    name, equals, values = text.partition("=")
    parts = [value.strip() for value in values.split(",")]
    if not equals or not name or not all(parts):
        raise UserError(f"--sweep {text!r} is not of the form section.setting=value,value,...")
    return [f"{name}={value}" for value in parts]


def sweep_points(sweeps: Sequence[str], presets: Sequence[str]) -> list[Overrides]:
    """Every combination of presets and swept values, the last sweep fastest."""
    if list(presets) == ["all"]:
        presets = list(SCHEDULE_PRESETS)
    axes = [[f"schedule.preset={preset}" for preset in presets]] if presets else []
    axes += [parse_sweep(text) for text in sweeps]
    return [tuple(point) for point in itertools.product(*axes)]


def run_points(
    settings: Mapping[str, Any],
    points: Iterable[Overrides],
    on_done: Callable[[Point], None],
) -> tuple[list[Point], list[tuple[str, UserError | ComponentFailure]]]:
    """Simulate each point; returns those that were, and what the others failed with, by name.

    All settings are checked before the first one runs. Raises UserError.
    """
    configs = []
    for labels in points:
        merged = dict(settings)
        for text in labels:
            merged = merge(merged, parse_override(text))
        try:
            configs.append((labels, build_simulation(merged)))
        except UserError as error:
            raise UserError(": ".join([*labels, str(error)])) from error
    out: list[Point] = []
    failed: list[tuple[str, UserError | ComponentFailure]] = []
    for labels, config in configs:
        try:
            out.append(Point(labels, config, simulate(config)))
        except (UserError, ComponentFailure) as error:
            failed.append((" ".join(labels) or config.schedule.preset, error))
            continue
        on_done(out[-1])
    return out, failed

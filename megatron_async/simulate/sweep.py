"""Implements `megatron-async simulate`: simulates one configuration, several presets, or a
Cartesian product of swept settings.

Precedence is recipe < preset < file < `--set` < `--presets` < `--sweep`. `--presets` only sets the
name of the preset, whose values have the low precedence of a preset. So they do not override
settings of `schedule` in the file.
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
    """One simulated configuration of a sweep, with its result.

    Attributes:
        labels: Overrides by which the configuration differs from the others.
        config: The whole configuration.
        summary: Result of the simulation.
    """

    labels: Overrides
    config: SimulationConfig
    summary: Summary


def parse_sweep(text: str) -> list[str]:
    """Split the text of a `--sweep` option, such as `a.b=1,2,3`, into one override for each value.

    Raises:
        UserError: The text does not have this form.
    """
    name, equals, values = text.partition("=")
    parts = [value.strip() for value in values.split(",")]
    if not equals or not name or not all(parts):
        raise UserError(f"--sweep is {text!r}; its form is section.setting=value,value,...")
    return [f"{name}={value}" for value in parts]


def sweep_points(sweeps: Sequence[str], presets: Sequence[str]) -> list[Overrides]:
    """Return the overrides of every combination of presets and swept values, in the order of nested
    loops of which the last sweep is the innermost.

    Args:
        sweeps: Texts of the `--sweep` options.
        presets: Names of presets, or only `all`; empty for the preset of the file.
    """
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
    """Simulate one configuration for each combination of overrides; return the results, and the
    error of each failed simulation by its label.

    Args:
        settings: Settings of the file, not validated yet.
        points: Overrides of each configuration.
        on_done: Called with each result as soon as its simulation has finished.

    Raises:
        UserError: Settings of a configuration are invalid. All configurations are checked before
            the first simulation.
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

"""Formats the output of `megatron-async plan`: a table of plans, and the best plan as YAML."""

from typing import Any

import yaml
from rich.table import Table

from megatron_async.simulate.planner import Candidate, RankedPlans
from megatron_async.simulate.show import cells

_COLUMNS = (
    "schedule",
    "trainers",
    "TPxPPxDP",
    "engines",
    "N'",
    "step s",
    "tokens/s",
    "lag",
)
_MORE_COLUMNS = ("memory", "recompute", "estimated s", "engine idle", "trainer idle")


def plan_table(plan: RankedPlans, *, wide: bool = False) -> Table:
    """Return a table of the simulated plans, the best plan first.

    Args:
        plan: The plans.
        wide: Whether to include every column.
    """
    columns = _COLUMNS + _MORE_COLUMNS if wide else _COLUMNS
    out = Table(title=f"best of {plan.considered} plans; within 2 % the simplest comes first")
    for name in columns:
        out.add_column(name, justify="right")
    for candidate in plan.candidates:
        layout, engines, summary = candidate.trainer.layout, candidate.engines, candidate.summary
        assert summary is not None
        shared = " shared" if candidate.config.simulate.placement == "colocated" else ""
        refused = "*" if candidate.refused else ""
        row = cells(summary) | {
            "schedule": candidate.config.schedule.preset,
            "trainers": f"{layout.ranks}{shared}{refused}",
            "TPxPPxDP": f"{layout.tensor}x{layout.pipeline}x{layout.data}",
            "memory": f"{candidate.trainer.memory / 1e9:.0f} GB",
            "recompute": str(candidate.trainer.recompute),
            "engines": f"{engines.count}xTP{engines.tensor}",
            "N'": str(engines.concurrency),
            "estimated s": f"{candidate.step_seconds:.1f}",
            "step s": f"{summary.step_seconds:.1f}",
        }
        out.add_row(*(row[name] for name in columns))
    return out


def plan_yaml(candidate: Candidate) -> str:
    """Return the settings of a plan as YAML text to paste into the file of a run."""
    layout, config = candidate.trainer.layout, candidate.config
    nodes = -(-layout.ranks // config.simulate.gpus_per_node)
    sections: dict[str, dict[str, Any]] = {
        "parallel": {
            "ranks": layout.ranks,
            "nodes": nodes,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "sequence": layout.sequence,
        },
        "engines": {
            "placement": config.simulate.placement,
            "count": candidate.engines.count,
            "tensor": candidate.engines.tensor,
        },
        "schedule": {
            "preset": config.schedule.preset,
            "concurrency": candidate.engines.concurrency,
        },
        "trainer": {"recompute": candidate.trainer.recompute},
    }
    comment = ""
    if config.simulate.placement == "colocated":
        sections["weights"] = {"transport": "tensor"}
        if candidate.refused:
            comment = "# A run refuses engines that share the GPUs of several nodes.\n"
    lines = (
        f"{name}: {yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=1000)}"
        for name, values in sections.items()
    )
    return comment + "".join(lines)

"""Partial credit for a sum that is worked out in steps, as in "3+4=7;7-2=5#5"."""

import re

from megatron_async.scoring.rewards import Sample


def score(sample: Sample, for_steps: float = 0.3) -> tuple[float, dict[str, float]]:
    """1 for the right answer; without it up to `for_steps`, by the share of steps that hold."""
    work, _, answer = sample.response.partition("#")
    right = float(answer.strip() == sample.answer)
    steps = [holds(step) for step in work.split(";")]
    share = sum(steps) / len(steps)
    return max(right, for_steps * share), {"right": right, "steps": share}


def holds(step: str) -> bool:
    """Whether a step like "7-2=5" is true."""
    found = re.fullmatch(r"(-?\d+)([+-]\d+)=(-?\d+)", step.strip())
    return found is not None and int(found[1]) + int(found[2]) == int(found[3])

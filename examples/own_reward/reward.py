"""A reward with partial credit for a sum that is calculated in steps, as in "3+4=7;7-2=5#5"."""

import re

from megatron_async.scoring.rewards import Sample


def score(sample: Sample, for_steps: float = 0.3) -> tuple[float, dict[str, float]]:
    """Return 1 for the right answer, else `for_steps` times the share of right steps."""
    work, _, answer = sample.response.partition("#")
    right = float(answer.strip() == sample.answer)
    steps = [holds(step) for step in work.split(";")]
    share = sum(steps) / len(steps)
    return max(right, for_steps * share), {"right": right, "steps": share}


def holds(step: str) -> bool:
    """Return whether an equation such as "7-2=5" is true."""
    found = re.fullmatch(r"(-?\d+)([+-]\d+)=(-?\d+)", step.strip())
    return found is not None and int(found[1]) + int(found[2]) == int(found[3])

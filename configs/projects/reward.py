"""A reward: score one response to a row of data.jsonl."""

from megatron_async.scoring.rewards import Sample


def score(sample: Sample, for_form: float = 0.1) -> tuple[float, dict[str, float]]:
    """Return 1 for the right number after the last "#", and `for_form` for any other number."""
    text = sample.response.rpartition("#")[2].strip()
    form = float(text.removeprefix("-").isdecimal())
    right = float(text == sample.answer)
    return max(right, for_form * form), {"right": right, "form": form}

"""A reward: a function that scores one response to a row of data.jsonl."""

from megatron_async.scoring.rewards import Sample


def score(sample: Sample, for_form: float = 0.1) -> tuple[float, dict[str, float]]:
    """Return the reward and its components: 1 if the text after the last "#" is the right answer,
    `for_form` if it is another integer, otherwise 0."""
    text = sample.response.rpartition("#")[2].strip()
    form = float(text.removeprefix("-").isdecimal())
    right = float(text == sample.answer)
    return max(right, for_form * form), {"right": right, "form": form}

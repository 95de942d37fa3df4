"""Tries a run's rewards on the task's first prompts before the run starts.

The user's own rewards and rewards that call a service score two made-up responses to the first
prompt. The reward `code` runs the reference solutions of several rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from megatron_async.config.reward import ASYNCHRONOUS, ScorerSettings
from megatron_async.errors import UserError, short_repr
from megatron_async.runtime.blocking import blocking
from megatron_async.scoring.pool import scored
from megatron_async.scoring.rewards.code import check_code
from megatron_async.scoring.rewards.reward import build_reward
from megatron_async.scoring.rewards.sample import Sample, sample_of
from megatron_async.tasks.layouts import Columns

TRIED_ROWS: Final = 8
"""Number of the task's first rows whose payloads a caller passes to `check_rewards`."""
_REFERENCE: Final = "canonical_solution"


def check_rewards(settings: ScorerSettings, *payloads: Mapping[str, Any]) -> tuple[str, ...]:
    """Try the rewards on prompts with these payloads; raise an error if one cannot score them.

    The user's own rewards and rewards that call a service score two responses to the first prompt
    (its reference answer and an empty text) in scorer processes, as in a run. Other rewards are
    only built. The reward `code` also runs the reference solutions of all payloads.

    Returns:
        Messages about checks that were not possible.

    Raises:
        UserError: If a reward cannot be built or fails.
    """
    tried, notices = [], []
    for config in settings.parts:
        if config.own or config.name in ASYNCHRONOUS:
            tried.append(config)
        else:
            build_reward(settings, config)
        if config.name == "code":
            references = _references(settings, payloads)
            check_code(settings, settings.limit_seconds(config), references)
            if not any(sample.response for sample in references.values()):
                columns = ", ".join(f"`{name}`" for name in _reference_columns(settings))
                notices.append(
                    f"reward code: none of the first {len(references)} rows has a reference "
                    f"solution (searched columns: {columns}), so the rows' tests could not be "
                    "tried. Set task.columns.response to the column with reference solutions."
                )
    texts = [str(payloads[0].get("answer", "")), ""]
    if tried:
        only_tried = settings.model_copy(update={"rewards": tried})
        (scores,) = blocking(scored(only_tried, [(payloads[0], texts)]))
        for failure in (failure for score in scores for failure in score.failures):
            raise UserError(
                f"{failure}. The rewards were tried on the responses {short_repr(texts)} to the "
                "first prompt."
            )
    return tuple(notices)


def _reference_columns(settings: ScorerSettings) -> list[str]:
    """Return the names of the columns that may hold a row's reference solution, each once."""
    files = settings.task.files()
    names = [_REFERENCE, *(Columns.of(f.layout, f.columns).response for f in files)]
    return list(dict.fromkeys(names))


def _references(
    settings: ScorerSettings, payloads: Sequence[Mapping[str, Any]]
) -> dict[str, Sample]:
    """Return a sample with the reference solution of each row, by a description of the row.

    The sample's response is the reference solution; it is empty if the row has none. The
    descriptions are for error messages.
    """
    columns = _reference_columns(settings)
    found = {}
    for payload in payloads:
        row, metadata = (
            f"the row with the prompt {short_repr(payload['question'])}",
            payload["metadata"],
        )
        column = next((name for name in columns if isinstance(metadata.get(name), str)), "")
        name = f"the reference `{column}` of {row}" if column else row
        found[name] = sample_of(payload, metadata.get(column, ""))
    return found

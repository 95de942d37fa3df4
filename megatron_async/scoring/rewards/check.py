"""Rewards tried before a run starts: on the task's first prompts.

Those of the user's get two made-up responses to the first one, `code` gets the reference solutions
of several rows.
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
_REFERENCE: Final = "canonical_solution"


def check_rewards(settings: ScorerSettings, *payloads: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse a reward that cannot score prompts with these payloads; return notices.

    Rewards of the user's and rewards that ask a service are called on the first prompt by scorer
    processes, as in a run. The others are only built. Raises UserError.
    """
    tried, notices = [], []
    for part in settings.parts:
        if part.own or part.name in ASYNCHRONOUS:
            tried.append(part)
        else:
            build_reward(settings, part)
        if part.name == "code":
            references = _references(settings, payloads)
            check_code(settings, settings.limit_seconds(part), references)
            if not any(sample.response for sample in references.values()):
                columns = ", ".join(f"`{name}`" for name in _reference_columns(settings))
                notices.append(
                    f"reward code: none of the first {len(references)} rows has a reference "
                    f"solution (columns looked for: {columns}), so that the rows' tests could not "
                    "be tried; task.columns.response names such a column"
                )
    texts = [str(payloads[0].get("answer", "")), ""]
    if tried:
        alone = settings.model_copy(update={"rewards": tried})
        (scores,) = blocking(scored(alone, [(payloads[0], texts)]))
        for failure in (failure for score in scores for failure in score.failures):
            raise UserError(
                f"{failure} (tried on {short_repr(texts)} as responses to the first prompt)"
            )
    return tuple(notices)


def _reference_columns(settings: ScorerSettings) -> list[str]:
    """Return the columns that may hold a row's reference solution, without repetition."""
    files = settings.task.files()
    names = [_REFERENCE, *(Columns.of(f.layout, f.columns).response for f in files)]
    return list(dict.fromkeys(names))


def _references(
    settings: ScorerSettings, payloads: Sequence[Mapping[str, Any]]
) -> dict[str, Sample]:
    """The reference solution of each row, by a name for it; an empty response where it has none."""
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

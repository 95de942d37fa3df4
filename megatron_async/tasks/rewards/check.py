"""Rewards tried before a run starts: on the task's first prompts.

Those of the user's get two made-up responses to the first one, `code` gets the reference solutions
of several rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import UserError, shown
from megatron_async.tasks.layouts import Columns
from megatron_async.tasks.rewards.code import check_code
from megatron_async.tasks.rewards.reward import build_reward
from megatron_async.tasks.rewards.sample import Sample, sample_of
from megatron_async.tasks.scorer_frames import BLOCKING, WAITING
from megatron_async.tasks.scorer_process import ScorerCrash, ScorerProcess, ScorerTimeout
from megatron_async.tasks.scorer_work import Work, split

TRIED_ROWS: Final = 8
_REFERENCE: Final = "canonical_solution"


def check_rewards(settings: ScorerSettings, *payloads: Mapping[str, Any]) -> None:
    """Refuse a reward that cannot score prompts with these payloads. Raises UserError.

    What is the user's, or waits for a service, is called in a scorer process as it is in a run, on
    the first one; the others are only built.
    """
    payload = payloads[0]
    tried = [part.own or part.name in ("http", "judge") for part in settings.parts]
    for part, own in zip(settings.parts, tried, strict=True):
        if not own:
            build_reward(settings, part)
        if part.name == "code":
            check_code(settings, settings.limit_seconds(part), _references(settings, payloads))
    if not any(tried):
        return
    texts = (str(payload.get("answer", "")), "")
    work = [w for w in split(settings, payload, texts) if tried[w.part]]
    if any(_try(settings, BLOCKING, work)):
        _try(settings, WAITING, work)


def _references(
    settings: ScorerSettings, payloads: Sequence[Mapping[str, Any]]
) -> dict[str, Sample]:
    """The reference solution of each row, by a name for it; an empty response where it has none."""
    files = settings.task.files()
    columns = [_REFERENCE, *(Columns.of(f.layout, f.columns).response for f in files)]
    found = {}
    for payload in payloads:
        row, metadata = f"the row with the prompt {shown(payload['question'])}", payload["metadata"]
        column = next((name for name in columns if isinstance(metadata.get(name), str)), "")
        name = f"the reference `{column}` of {row}" if column else row
        found[name] = sample_of(payload, metadata.get(column, ""))
    return found


def _try(settings: ScorerSettings, kind: str, work: Sequence[Work]) -> list[bool]:
    """Try what a process of this kind scores; which rewards are asynchronous."""
    process = ScorerProcess(settings, kind)
    waits = process.ready()
    try:
        for piece in work:
            if waits[piece.part] == (kind == WAITING):
                _try_one(settings, process, piece)
    finally:
        process.end()
    return waits


def _try_one(settings: ScorerSettings, process: ScorerProcess, work: Work) -> None:
    part = settings.parts[work.part]
    where = f"reward is {part.name!r}"
    try:
        (reply,) = process.ask([work])
    except ScorerTimeout as error:
        raise UserError(
            f"{where}, which had no score within {settings.limit_seconds(part):g} s for "
            f"{_shown(work)}: raise its timeout_seconds (or task.verifier_timeout_seconds), or "
            "make it faster"
        ) from error
    except ScorerCrash as error:
        raise UserError(f"{where}, whose process ended on {_shown(work)}: {error}") from error
    if "error" in reply:
        raise UserError(f"{where}, which failed on {_shown(work)}: {reply['error']}")


def _shown(work: Work) -> str:
    if len(work.texts) > 1:
        return "a trial group of the first prompt"
    return f"the trial response {work.texts[0][:40]!r} to the first prompt"

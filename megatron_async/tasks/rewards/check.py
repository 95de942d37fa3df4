"""Rewards tried before a run starts: on the task's first prompt, with two made-up responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import UserError
from megatron_async.tasks.rewards.reward import build_reward
from megatron_async.tasks.scorer_frames import BLOCKING, WAITING
from megatron_async.tasks.scorer_process import ScorerCrash, ScorerProcess, ScorerTimeout
from megatron_async.tasks.scorer_work import Work, split


def check_rewards(settings: ScorerSettings, payload: Mapping[str, Any]) -> None:
    """Refuse a reward that cannot score a prompt with this payload. Raises UserError.

    What is the user's, or waits for a service, is called in a scorer process as it is in a run;
    the others are only built.
    """
    tried = [part.own or part.name in ("http", "judge") for part in settings.parts]
    for part, own in zip(settings.parts, tried, strict=True):
        if not own:
            build_reward(settings, part)
    if not any(tried):
        return
    texts = (str(payload.get("answer", "")), "")
    work = [w for w in split(settings, payload, texts) if tried[w.part]]
    if any(_try(settings, BLOCKING, work)):
        _try(settings, WAITING, work)


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

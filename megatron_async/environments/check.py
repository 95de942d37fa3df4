"""An episode played before anything starts, with a made-up answer, in a worker as in a run."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_async.config import RunConfig
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.programs import is_blocking
from megatron_async.environments.worker import TrialEpisode
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.private_directory import process_directory
from megatron_async.process_backends.local import local_backend
from megatron_async.runtime.blocking import blocking

_MOST_SHOWN: Final = 2000


@dataclass(frozen=True)
class CheckedEnvironment:
    """The opening of the first episode, and sentences that a person should read."""

    summary: str
    notices: tuple[str, ...]


def check_environment(
    config: RunConfig, payload: Mapping[str, Any], longest: int | None
) -> CheckedEnvironment:
    """Play an episode of the prompt with this payload. Raises UserError where it cannot be played.

    `longest`: tokens that an engine takes.
    """
    shown = config.player.display_name
    _check_threads(config)
    try:
        played = blocking(_rehearsed(config, payload))
    except (EnvironmentFault, ComponentFailure) as error:
        what = str(error) if str(error).startswith(shown) else f"{shown}: {error}"
        raise UserError(f"{what} (in an episode played before the start)") from error
    if not (played.rewards or config.reward):
        raise UserError(
            f"{shown} has no reward in a trial episode, and reward is not set: such an episode "
            "would have the reward 0. Set reward, give the class a method get_reward, or set "
            "self.reward to a number in its reset"
        )
    new = config.sampling.max_new_tokens
    for what, tokens in (("the opening", played.opening), ("an observation", played.observation)):
        if longest is not None and tokens + new > longest:
            raise UserError(
                f"{shown}: {what} has {tokens} tokens, which with "
                f"sampling.max_new_tokens {new} is more than the {longest} that an engine takes "
                "(engines.context_length, else the model's; engines.max_total_tokens)"
            )
    notices = []
    if played.differs:
        notices.append(
            f"{shown} opens two episodes of one row differently: "
            "members of a group are compared, and should begin alike (take what is drawn from the "
            "row's seed)"
        )
    text = played.text[:_MOST_SHOWN]
    summary = f"first episode, {played.opening} tokens before the first answer:\n{text}"
    return CheckedEnvironment(summary, tuple(notices))


def _check_threads(config: RunConfig) -> None:
    """Refuse an agent of which each open episode keeps a thread, where there are too few."""
    agent, episode, schedule = config.agent, config.episode, config.schedule
    opened = schedule.open_episodes or schedule.concurrency
    if not agent.used or not isinstance(opened, int) or not is_blocking(agent):
        return
    if opened > episode.workers * episode.threads:
        raise UserError(
            f"{agent.display_name} is no `async def`, so that each open episode keeps a thread; "
            f"episode.workers x episode.threads is {episode.workers * episode.threads}, and "
            f"{opened} episodes or more are open (schedule.open_episodes, else "
            "schedule.concurrency): raise episode.threads or write `async def`"
        )


async def _rehearsed(config: RunConfig, payload: Mapping[str, Any]) -> TrialEpisode:
    alone = config.with_section("episode", workers=1)
    logs = process_directory("megatron-async-environment-", Path(tempfile.gettempdir()))
    named = False
    try:
        with local_backend(logs) as backend:
            return await EnvironmentWorkers(alone, backend).trial_run(payload)
    except ComponentFailure:
        named = True  # the worker's log, by the sentence
        raise
    finally:
        if not named:
            shutil.rmtree(logs)

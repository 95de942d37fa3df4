"""Plays a trial episode with made-up responses before a run starts.

The episode runs in a worker process, as the episodes of a run do. Errors of the user's environment
or agent are thereby found before GPUs are used.
"""

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

_MAX_SHOWN: Final = 2000


@dataclass(frozen=True)
class CheckedEnvironment:
    """Result of a successful check of the run's environment or agent.

    Attributes:
        summary: Text that shows the opening of the trial episode.
        notices: Warnings for the user.
    """

    summary: str
    notices: tuple[str, ...]


def check_environment(
    config: RunConfig, payload: Mapping[str, Any], longest: int | None
) -> CheckedEnvironment:
    """Play a trial episode of the run's environment or agent, and check what a run needs of it.

    Args:
        config: Settings of the run.
        payload: Payload of the prompt for which the episode is played.
        longest: Largest number of tokens that an engine accepts for prompt and response together;
            None if not known.

    Raises:
        UserError: The episode failed, its environment gives no reward, its texts are too long for
            an engine, or a blocking agent has too few threads.
    """
    shown = config.player.display_name
    _check_threads(config)
    try:
        played = blocking(_trial_run(config, payload))
    except (EnvironmentFault, ComponentFailure) as error:
        what = str(error) if str(error).startswith(shown) else f"{shown}: {error}"
        raise UserError(f"{what} (in a trial episode before the start)") from error
    if not (played.rewards or config.reward):
        raise UserError(
            f"{shown} has no reward in a trial episode, and reward is not set; every episode would "
            "have the reward 0. Set reward, add a method get_reward to the class, or set "
            "self.reward to a number in its reset."
        )
    new = config.sampling.max_new_tokens
    for what, tokens in (("the opening", played.opening), ("an observation", played.observation)):
        if longest is not None and tokens + new > longest:
            raise UserError(
                f"{shown}: {what} has {tokens} tokens; with sampling.max_new_tokens {new}, this is "
                f"more than the {longest} tokens that an engine accepts (engines.context_length, "
                "or else the model's; engines.max_total_tokens)"
            )
    notices = []
    if played.differs:
        notices.append(
            f"{shown} opens two episodes of the same row differently; episodes of one group are "
            "compared with each other, so they should start alike. Draw random values from the "
            "row's seed."
        )
    text = played.text[:_MAX_SHOWN]
    summary = f"first episode, {played.opening} tokens before the first answer:\n{text}"
    return CheckedEnvironment(summary, tuple(notices))


def _check_threads(config: RunConfig) -> None:
    """Raise UserError for an agent that blocks one thread per open episode but has too few threads.

    An agent that is not `async def` keeps its thread until its episode ends.
    """
    agent, episode, schedule = config.agent, config.episode, config.schedule
    opened = schedule.open_episodes or schedule.concurrency
    if not agent.used or not isinstance(opened, int) or not is_blocking(agent):
        return
    if opened > episode.workers * episode.threads:
        raise UserError(
            f"{agent.display_name} is not `async def`, so each open episode keeps a thread; "
            f"episode.workers x episode.threads is {episode.workers * episode.threads}, but at "
            f"least {opened} episodes are open (schedule.open_episodes, or else "
            "schedule.concurrency). Raise episode.threads or write `async def`."
        )


async def _trial_run(config: RunConfig, payload: Mapping[str, Any]) -> TrialEpisode:
    """Play a trial episode in a new worker process, end the process, and return measurements.

    The directory with the worker's log is removed unless an error message refers to it.
    """
    single = config.with_section("episode", workers=1)
    logs = process_directory("megatron-async-environment-", Path(tempfile.gettempdir()))
    keeps_logs = False
    try:
        with local_backend(logs) as backend:
            return await EnvironmentWorkers(single, backend).trial_run(payload)
    except ComponentFailure:
        keeps_logs = True  # The error message names the worker's log.
        raise
    finally:
        if not keeps_logs:
            shutil.rmtree(logs)

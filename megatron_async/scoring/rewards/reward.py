"""Builds a reward function from its settings, calls it, and checks the scores that it returns.

Invariants
- The functions of this module import the user's code into the process that calls them. For the
  user's own rewards, only scorer processes call them, so that this code runs nowhere else.
- Built-in rewards and the user's own have the same form: a callable of one `Sample`, or, with the
  setting `group`, of a list of samples; plain or `async def`.
- An exception while the user's reward is imported or built becomes a `UserError` that names the
  user's file and line.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from megatron_async.config.base import Settings
from megatron_async.config.load import describe
from megatron_async.config.reward import ASYNCHRONOUS, RewardConfig, ScorerSettings
from megatron_async.errors import UserError, short_repr
from megatron_async.runtime.import_path import described, file_of, load_object
from megatron_async.scoring.rewards.sample import RewardScore, Sample, score_of

_CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "task": "compare:TaskReward",
        "exact": "compare:Exact",
        "regex": "compare:Regex",
        "math": "compare:Math",
        "code": "code:Code",
        "command": "code:Command",
        "http": "services:Http",
        "judge": "services:Judge",
    }
)


class Reward:
    """A reward function with its settings, ready to score samples in this process.

    Attributes:
        display_name: The reward's name in metrics and messages.
    """

    def __init__(self, config: RewardConfig, function: Callable[..., Any], file: str = "") -> None:
        """Wrap a reward function.

        Args:
            config: The reward's settings.
            function: The callable that scores a sample, or a list of samples with `group: true`.
            file: The user's file that defines the reward; empty for a built-in reward.
        """
        self.display_name = config.display_name
        self._group = config.group
        self._function = function
        self._file = file

    def score(self, samples: Sequence[Sample]) -> list[RewardScore]:
        """Score samples with this blocking reward; return one checked score for each sample.

        Exceptions of the reward function are not caught.

        Raises:
            ValueError: If the reward returns something that is not a valid score.
        """
        return self._scores(self._function(self._argument(samples)), len(samples))

    async def score_async(self, samples: Sequence[Sample]) -> list[RewardScore]:
        """Score samples with this asynchronous reward; return one checked score for each sample.

        Exceptions of the reward function are not caught.

        Raises:
            ValueError: If the reward returns something that is not a valid score.
        """
        return self._scores(await self._function(self._argument(samples)), len(samples))

    def described(self, error: BaseException) -> str:
        """Return an exception of this reward as one line, with the line in the user's file."""
        return described(error, self._file)

    def _argument(self, samples: Sequence[Sample]) -> Sample | list[Sample]:
        """Return the argument for the reward function: the only sample, or a list for a group."""
        if self._group:
            return list(samples)
        (sample,) = samples
        return sample

    def _scores(self, returned: Any, count: int) -> list[RewardScore]:
        """Check the value that the reward function returned; return one score for each sample.

        Args:
            returned: The value.
            count: Number of samples.

        Raises:
            ValueError: If the value is not a valid score, or not a list of `count` valid scores for
                a reward with `group: true`.
        """
        if not self._group:
            return [score_of(returned)]
        if not isinstance(returned, Sequence) or len(returned) != count:
            raise ValueError(
                f"the reward has `group: true` and returned {short_repr(returned)} for {count} "
                "responses; it must return a list with one score for each response"
            )
        return [score_of(item) for item in returned]


def asynchronous(config: RewardConfig) -> bool:
    """Return whether a reward is asynchronous, that is, an `async def` function or `__call__`.

    To find out, a reward of the user's is imported, but no object of it is built.

    Raises:
        UserError: If the import fails.
    """
    if not config.own:
        return config.name in ASYNCHRONOUS
    found = load_object(config.name, "reward")
    called = found.__call__ if inspect.isclass(found) else found
    return inspect.iscoroutinefunction(called) or (
        inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004
    )


def arguments_of(built_in: str) -> type[Settings]:
    """Return the settings class that defines the arguments of a built-in reward, given by name."""
    module, _, name = _CLASSES[built_in].partition(":")
    found: type[Settings] = getattr(import_module(f"megatron_async.scoring.rewards.{module}"), name)
    return found


def build_reward(settings: ScorerSettings, config: RewardConfig) -> Reward:
    """Build the reward that `config` describes, so that it can score in this process.

    A reward of the user's is imported.

    Raises:
        UserError: If the reward does not exist, refuses its arguments or cannot be built.
    """
    if config.own:
        return _user_reward(config)
    try:
        reward: Settings = arguments_of(config.name).model_validate(config.arguments)
    except ValidationError as error:
        raise UserError(f"reward {config.name}: arguments.{describe(error)}") from error
    function: Callable[..., Any] = reward.build_scorer(  # type: ignore[attr-defined]
        settings, settings.limit_seconds(config)
    )
    return Reward(config, function)


def _user_reward(config: RewardConfig) -> Reward:
    """Import and build a reward of the user's: a function, or a class that is instantiated here.

    Raises:
        UserError: If it cannot be imported, is not a function or a class with `__call__`, or the
            class raises an exception.
    """
    found = load_object(config.name, "reward")
    if not callable(found):
        raise UserError(f"reward is {config.name!r}, which is neither a function nor a class")
    file = file_of(found)
    if not inspect.isclass(found):
        return Reward(config, partial(found, **config.arguments), file)
    if "__call__" not in dir(found) or not inspect.isfunction(found.__call__):
        raise UserError(f"reward is {config.name!r}, a class without a `__call__` method")
    made: Any = found
    try:
        return Reward(config, made(**config.arguments), file)
    except Exception as error:  # The user's class may raise any exception.
        raise UserError(f"reward is {config.name!r}: {described(error, file)}") from error

"""A reward as its settings describe it: found, built, called, its result checked.

Invariants
- The user's code is imported where this is called, which is a scorer process and nowhere else.
- Built-in rewards and the user's are the same thing: a callable of one `Sample`, or of a list of
  them (`group`), plain or `async def`.
- An exception on the way to a reward is a `UserError` that names the user's file and line.
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
    """A reward, ready to score in this process."""

    def __init__(self, config: RewardConfig, function: Callable[..., Any], file: str = "") -> None:
        self.display_name = config.display_name
        self._group = config.group
        self._function = function
        self._file = file

    def score(self, samples: Sequence[Sample]) -> list[RewardScore]:
        """Score each sample. Raises what the reward raises."""
        return self._scores(self._function(self._argument(samples)), len(samples))

    async def score_async(self, samples: Sequence[Sample]) -> list[RewardScore]:
        """The same for an asynchronous one."""
        return self._scores(await self._function(self._argument(samples)), len(samples))

    def described(self, error: BaseException) -> str:
        """An exception of the reward in one line, with the place in the user's own file."""
        return described(error, self._file)

    def _argument(self, samples: Sequence[Sample]) -> Sample | list[Sample]:
        if self._group:
            return list(samples)
        (sample,) = samples
        return sample

    def _scores(self, returned: Any, count: int) -> list[RewardScore]:
        if not self._group:
            return [score_of(returned)]
        if not isinstance(returned, Sequence) or len(returned) != count:
            raise ValueError(
                f"the reward has `group: true` and returned {short_repr(returned)} for {count} "
                "responses; it must return a list of one score for each"
            )
        return [score_of(item) for item in returned]


def asynchronous(config: RewardConfig) -> bool:
    """True for a reward that waits. Imports the user's code, builds nothing."""
    if not config.own:
        return config.name in ASYNCHRONOUS
    found = load_object(config.name, "reward")
    called = found.__call__ if inspect.isclass(found) else found
    return inspect.iscoroutinefunction(called) or (
        inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004
    )


def arguments_of(built_in: str) -> type[Settings]:
    """The model of a built-in reward's arguments."""
    module, _, name = _CLASSES[built_in].partition(":")
    found: type[Settings] = getattr(import_module(f"megatron_async.scoring.rewards.{module}"), name)
    return found


def build_reward(settings: ScorerSettings, config: RewardConfig) -> Reward:
    """`config`, ready to be called. Raises UserError."""
    if config.own:
        return _own(config)
    try:
        reward: Settings = arguments_of(config.name).model_validate(config.arguments)
    except ValidationError as error:
        raise UserError(f"reward {config.name}: arguments.{describe(error)}") from error
    function: Callable[..., Any] = reward.build_scorer(  # type: ignore[attr-defined]
        settings, settings.limit_seconds(config)
    )
    return Reward(config, function)


def _own(config: RewardConfig) -> Reward:
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
    except Exception as error:  # The user's class may raise anything.
        raise UserError(f"reward is {config.name!r}: {described(error, file)}") from error

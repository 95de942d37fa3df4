"""Provides `task.kind: reasoning_gym`: the data sets of the optional package reasoning-gym.

The package is optional because pycosat, which it depends on, is compiled from C source when it is
installed.
"""

from typing import Any, Final

from megatron_async.errors import UserError
from megatron_async.tasks.base import Dataset

# Tasks of reasoning-gym 0.1.25 whose scorer is unusable for reinforcement learning.
UNUSABLE: Final = {"game_of_life_halting": "its scorer gives full score to every answer"}


def check_name(name: str) -> None:
    """Raise a UserError unless reasoning-gym is installed and `name` is one of its usable tasks."""
    if not name:
        raise UserError("task.name is empty; task.kind reasoning_gym needs the name of a task.")
    if name in UNUSABLE:
        raise UserError(f"task.name {name!r} cannot be used: {UNUSABLE[name]}")
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise UserError(
            f"task.kind is reasoning_gym; the package "
            f"{(error.name or 'reasoning_gym').partition('.')[0]} is not installed. Install "
            "megatron_async[reasoning-gym], or in a clone: bash launch/setup_env.sh tasks (its "
            "package pycosat needs a C compiler)."
        ) from error
    if name not in DATASETS:
        raise UserError(f"task.name {name!r} is not a task of reasoning-gym")


def make_dataset(name: str, *, seed: int, size: int, **arguments: Any) -> Dataset:
    """Return a data set of `size` problems of the reasoning-gym task `name`.

    For bad arguments, it raises whatever reasoning-gym raises.
    """
    import reasoning_gym

    dataset: Dataset = reasoning_gym.create_dataset(name, seed=seed, size=size, **arguments)
    return dataset

"""`task.kind: reasoning_gym`: the data sets of the optional package reasoning-gym.

The package is an extra because pycosat, which it needs, is built from source with a C compiler.
"""

from typing import Any, Final

from megatron_async.errors import UserError
from megatron_async.tasks.base import Dataset

# Tasks of reasoning-gym 0.1.25 on which RL would learn nonsense.
UNUSABLE: Final = {"game_of_life_halting": "its scorer gives full score to every answer"}


def check_name(name: str) -> None:
    """Raise UserError unless `name` is a usable task of reasoning-gym, which is installed."""
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
    """Return `size` problems of task `name`. Raises what reasoning-gym raises for arguments."""
    import reasoning_gym

    dataset: Dataset = reasoning_gym.create_dataset(name, seed=seed, size=size, **arguments)
    return dataset

"""Asynchronous reinforcement learning of language models with Megatron-core and SGLang.

    from megatron_async import load_config, train
    run = train(load_config("first.yaml"))
    run.metrics[-1]["reward/mean"]

The public names are imported at first use, so that `import megatron_async` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.commands.library import Run, open_run, train
    from megatron_async.config import RunConfig, build_config, load_config
    from megatron_async.errors import ComponentFailure, UserError
    from megatron_async.scheduler import Scheduler
    from megatron_async.store.reader import StoreReader
    from megatron_async.store.store import TrajectoryStore
    from megatron_async.trajectory.batch import TokenBatch

__version__ = "0.1.0"
_MODULES = {
    "ComponentFailure": "errors",
    "Run": "commands.library",
    "RunConfig": "config",
    "Scheduler": "scheduler",
    "StoreReader": "store.reader",
    "TokenBatch": "trajectory.batch",
    "TrajectoryStore": "store.store",
    "UserError": "errors",
    "build_config": "config",
    "load_config": "config",
    "open_run": "commands.library",
    "train": "commands.library",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

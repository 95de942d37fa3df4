"""Creates and starts the trackers that the settings name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from megatron_async.config.run import TelemetryConfig
from megatron_async.errors import UserError
from megatron_async.runtime.import_path import described, is_import_path, load_object
from megatron_async.telemetry.trackers.base import BackgroundTracker, TrackedRun, Tracker

BUILT_IN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tensorboard": "megatron_async.telemetry.trackers.tensorboard:TensorBoardTracker",
        "wandb": "megatron_async.telemetry.trackers.weights_and_biases:WandbTracker",
        "mlflow": "megatron_async.telemetry.trackers.mlflow_server:MlflowTracker",
    }
)


def build_trackers(config: TelemetryConfig) -> dict[str, Tracker]:
    """Create the trackers that the settings name, without starting them; return them by their
    names.

    Raises:
        UserError: If a tracker is unknown, named twice, or refuses its arguments.
    """
    found: dict[str, Tracker] = {}
    for setting in config.trackers:
        name = setting.name.rpartition(":")[2]
        if name in found:
            raise UserError(f"telemetry.trackers has {name!r} twice")
        found[name] = _tracker(setting.name, setting.arguments)
    return found


def _tracker(name: str, arguments: Mapping[str, Any]) -> Tracker:
    """Create the tracker `name` with its arguments. `name` is the name of a built-in tracker or an
    import path.

    Raises:
        UserError: If it cannot be created or is not a `Tracker`.
    """
    if name not in BUILT_IN and not is_import_path(name):
        raise UserError(
            f"telemetry.trackers has {name!r}; a tracker is one of {', '.join(BUILT_IN)}, or "
            "package.module:Class or path/to/file.py:Class"
        )
    try:
        tracker = load_object(BUILT_IN.get(name, name), "telemetry.trackers")(**arguments)
    except UserError as error:
        more = f"; install it with `pip install {name}`" if name in BUILT_IN else ""
        raise UserError(f"{error}{more}") from error
    except Exception as error:  # A user-defined class may raise anything.
        raise UserError(
            f"telemetry.trackers: {name} refuses its arguments {dict(arguments)}: "
            f"{described(error)}"
        ) from error
    if not isinstance(tracker, Tracker):
        raise UserError(
            f"telemetry.trackers: {name} is not a megatron_async.telemetry.trackers.base.Tracker"
        )
    return tracker


def start_trackers(config: TelemetryConfig, run: TrackedRun) -> list[BackgroundTracker]:
    """Create the trackers of the settings and start each on a dedicated thread.

    Raises:
        UserError: If a tracker cannot be created.
    """
    return [
        BackgroundTracker(name, tracker, run) for name, tracker in build_trackers(config).items()
    ]

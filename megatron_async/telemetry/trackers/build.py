"""From settings to trackers."""

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
    """The trackers of the settings by their names; none is started. Raises UserError."""
    found: dict[str, Tracker] = {}
    for wanted in config.trackers:
        name = wanted.name.rpartition(":")[2]
        if name in found:
            raise UserError(f"telemetry.trackers has {name!r} twice")
        found[name] = _tracker(wanted.name, wanted.arguments)
    return found


def _tracker(name: str, arguments: Mapping[str, Any]) -> Tracker:
    if name not in BUILT_IN and not is_import_path(name):
        raise UserError(
            f"telemetry.trackers has {name!r}; a tracker is one of {', '.join(BUILT_IN)}, or "
            "package.module:Class or path/to/file.py:Class"
        )
    try:
        made = load_object(BUILT_IN.get(name, name), "telemetry.trackers")(**arguments)
    except UserError as error:
        more = f"; install it with `pip install {name}`" if name in BUILT_IN else ""
        raise UserError(f"{error}{more}") from error
    except Exception as error:  # the user's class may raise anything
        raise UserError(
            f"telemetry.trackers: {name} refuses its arguments {dict(arguments)}: "
            f"{described(error)}"
        ) from error
    if not isinstance(made, Tracker):
        raise UserError(
            f"telemetry.trackers: {name} is no megatron_async.telemetry.trackers.base.Tracker"
        )
    return made


def start_trackers(config: TelemetryConfig, run: TrackedRun) -> list[BackgroundTracker]:
    """All of them, each on a thread of its own. Raises UserError."""
    return [
        BackgroundTracker(name, tracker, run) for name, tracker in build_trackers(config).items()
    ]

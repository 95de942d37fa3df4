"""Provides a complete rollout manager over simulated engines, with time limits of about a second
instead of minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from tests.rollout.stand_ins import Engines, Fixed, settings
from tests.rollout.test_manager import Trainer

# Replaces two minutes. Long compared with an iteration of the event loop on a loaded machine.
HANG_SECONDS = 1.0
LIMITS = {
    "hang_timeout_seconds": HANG_SECONDS,
    "max_restarts": 0,
}


def config_of(preset: str, count: int = 2, **changes: Any) -> RunConfig:
    base = settings(preset, engines=count).model_dump()
    return build_config(merge(merge(base, {"engines": LIMITS}), changes))


class ModelEngines(Engines):
    """Launcher of simulated engines of one class and model."""

    def __init__(
        self, model: SimulatedEngineModel, kind: type[SimulatedEngine] = SimulatedEngine
    ) -> None:
        super().__init__()
        self._model, self._kind = model, kind

    async def launch(self, index: int) -> SimulatedEngine:
        self.all.append(self._kind(f"engine{index}.{len(self.all)}", self._model))
        return self.all[-1]

    async def alive(self, index: int) -> bool:
        return True


def trainer_of(folder: Path, config: RunConfig, engines: Engines, task: Fixed | None = None) -> Any:
    return Trainer(folder, config, task, engines)


def in_service(trainer: Trainer) -> tuple[int, dict[str, str]]:
    status = trainer.manager.status()
    return status["engines_up"], status["warnings"]

"""Defines the typed settings of a run. Unknown keys are refused, and every setting has a
description.

- run: `RunConfig`, which contains all sections of a run and checks that they fit together. The
  sections checkpoint, sft, telemetry and experiment are defined here too.
- algorithm: advantages, correction, losses.
- schedule: the settings of the scheduler.
- recipes: defaults of published methods (recipes) and of the five schedules (presets). Precedence:
  recipe < preset < YAML < command line.
- model: the model, its parallel layout, the optimizer with its learning rate, the trainer.
- rollout: tasks, sampling, engines (GPUs, placement), the transport of weights to the engines, the
  trajectory store.
- data: prompts and how they become tokens.
- evaluation: sets of problems to evaluate on.
- reward: how a response is scored.
- environment: episodes of many turns, and the environment or agent that plays them.
- simulate: the simulator and the planner.
- sampling_contract: conditions under which an engine's log-probs describe the distribution that it
  samples from.
- thresholds: parses the threshold notations of the rollout correction.
- reference: all settings as a list, and suggestions for misspelled names.
- base: the base class of settings.
- files: reads files and refuses invalid ones.
- load: builds a checked configuration from a YAML file and `section.setting=value` overrides.
"""

from megatron_async.config.load import build_config, dump, load_config
from megatron_async.config.run import RunConfig

__all__ = ["RunConfig", "build_config", "dump", "load_config"]

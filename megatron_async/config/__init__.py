"""Typed settings of a run. Unknown keys are refused; every setting has a description.

- run: `RunConfig`, all sections together, and checks across them; evaluation, checkpoints.
- algorithm: advantages, correction, losses.
- schedule: the policy space of the scheduler.
- recipes: recipes of published methods, and the five schedules (presets). recipe < preset < YAML <
  command line.
- model: the model, its parallel layout, the optimizer (learning rate), the trainer.
- rollout: tasks, sampling, engines (GPUs, placement), weight exchange, the store.
- data, evaluation, reward: prompts and their tokens; sets to evaluate on; what scores a response.
- environment: episodes of many turns, and the environment or agent that plays them.
- simulate: simulations, the files of the simulator and the planner.
- sampling_contract: when an engine's log-probs describe what it samples from.
- thresholds: the threshold notations of the correction, parsed once.
- reference: every setting as a list; "did you mean".
- base, files, load: the settings' base; files read with refusals of one sentence; YAML and
  overrides.
"""

from megatron_async.config.load import build_config, dump, load_config
from megatron_async.config.run import RunConfig

__all__ = ["RunConfig", "build_config", "dump", "load_config"]

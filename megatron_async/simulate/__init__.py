"""Simulates a run: the real scheduler on a virtual clock, with cost models for everything else.

- `world` is the virtual clock around the real scheduler; `build` creates a world from a run's
  settings.
- `engine` models an inference engine as a decode batch that advances from event to event;
  `engine_costs` says how long decode steps and prefill take.
- `trainer_costs`, `memory` and `hardware` model the trainer, GPU memory and GPUs (data sheets).
  `recomputation` models what `trainer.recompute` keeps and computes again.
- `episodes` draws turns, observations and tool times. `lengths` reads, draws and fits response
  lengths, which are the same for every schedule.
- `sweep` simulates many configurations; `statistics` computes their results after the warm-up;
  `show` prints and plots them.
- `planner` is `megatron-async plan`, and `plan_show` prints its result.
- `profile_engine` measures the cost model of a running server.
- `assumptions` lists everything that a simulation assumes, one line per assumption.
"""

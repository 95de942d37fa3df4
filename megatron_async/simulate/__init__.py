"""Simulates a run: the scheduler that real runs use, on a virtual clock, with cost models for
engines, scorers, environments and the trainer.

- `world` is the virtual clock around the real scheduler; `build` creates a world from a run's
  settings.
- `engine` models an inference engine as a decode batch that advances from event to event;
  `engine_costs` computes how long decode steps and prefill take.
- `trainer_costs` computes the time of training and of weight updates, and `memory` the use of GPU
  memory. `hardware` has the data sheets of GPUs. `recomputation` computes the memory and the time
  of each value of `trainer.recompute`.
- `episodes` draws turns, observations and tool times. `lengths` reads, draws and fits response
  lengths, which are the same for every schedule.
- `sweep` simulates many configurations; `statistics` computes their results after the warm-up;
  `show` prints and plots them.
- `planner` is `megatron-async plan`, and `plan_show` prints its result.
- `profile_engine` measures the times of a running engine, from which a cost model is made.
- `assumptions` lists everything that a simulation assumes, one line per assumption.
"""

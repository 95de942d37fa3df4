"""Cost models on a virtual clock that drive the same scheduler.

- world: the virtual clock around the real scheduler. build: a world from a run's settings.
- engine, engine_costs: a decode batch from event to event; what decode steps and prefill cost.
- trainer_costs, memory, hardware: the trainer, GPU memory, data sheets. recomputation: what
  `trainer.recompute` keeps and computes again.
- episodes: turns, observations and tools, drawn.
- lengths: lengths drawn, recorded, fitted; the same for every schedule.
- sweep, statistics, show: many points; their figures after the warm-up; tables and plots.
- planner: `megatron-async plan`. plan_show: its output.
- profile_engine: a running server's cost model, measured.
- assumptions: everything a simulation rests on, as lines for a person.
"""

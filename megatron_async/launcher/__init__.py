"""Starts, watches and ends the processes of a run.

- supervisor: a whole run on this machine: notices a process that ends, and cleans up.
- node: one node of a launch over several. session: that launch's roles, by files in the run
  directory, and the rendezvous of its torchrun agents.
- rank_job: work of the trainer's ranks alone: fine-tuning, scoring.
- rollout_side: the rollout manager from outside: create, look after, end.
- processes: torchrun, for the trainer ranks of this machine.
- devices: split of a machine's GPUs into those that train and those that generate.
- environment: variables of every role, the GPU settings among them, for every way of starting.
- derived: settings that follow from the machine and the model, unless they are set.
- estimates: seconds of a stop and of an update, bytes of checkpoints, by a run's settings.
- preflight: what is refused before any process starts.
- run_lock: a run belongs to one launch at a time (`run.lock`).
"""

"""Starts, monitors and ends the processes of a run.

The processes of a run are the trainer ranks and the rollout side: the rollout manager, which owns
the engines and scorers.

- supervisor: runs a whole training run on this machine, detects processes that end, and cleans up.
- node: runs one node of a launch over several nodes.
- session: the files in the run directory by which the nodes of such a launch coordinate, and the
  rendezvous of their torchrun agents.
- rank_job: runs jobs that have only trainer ranks, which are fine-tuning and scoring.
- rollout_side: creates, monitors and ends the rollout manager.
- processes: runs torchrun for the trainer ranks of this machine.
- devices: divides a machine's GPUs between trainer and engines.
- environment: environment variables of every role, including GPU settings.
- derived: settings that are derived from the machine and the model unless the user sets them.
- estimates: estimated memory, size of checkpoints, and time of a step, a weight update and a stop.
- preflight: checks that refuse a run before its processes start.
- run_lock: ensures that only one launch at a time uses a run directory (`run.lock`).
"""

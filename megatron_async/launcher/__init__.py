"""Starts, monitors and ends the processes of a run.

- supervisor: runs a whole training run on this machine, detects processes that end, and cleans up.
- node: runs one node of a launch over several nodes. session: the files in the run directory by
  which the nodes of such a launch coordinate, and the rendezvous of their torchrun agents.
- rank_job: jobs with trainer ranks only: fine-tuning and scoring.
- rollout_side: creates, monitors and ends the rollout manager.
- processes: runs torchrun for the trainer ranks of this machine.
- devices: divides a machine's GPUs between trainer and engines.
- environment: environment variables of every role, including GPU settings.
- derived: settings that are derived from the machine and the model unless the user sets them.
- estimates: estimated seconds of a stop and of an update, and bytes of checkpoints.
- preflight: checks that refuse a run before any process starts.
- run_lock: ensures that only one launch at a time uses a run directory (`run.lock`).
"""

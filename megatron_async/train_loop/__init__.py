"""The loop that every trainer rank runs: train on a batch, publish the weights, save checkpoints.

- loop: the training loop. After n steps, it publishes policy version n.
- manager_client: the trainer's calls to the rollout manager, each with a time limit.
- rank, sft_rank, score_rank: entry points of a rank that torchrun starts, for RL, fine-tuning and
  `score`.
- attempt: the exit code and the failure message of a rank, and the count of torchrun's restarts of
  all ranks.
- assembly: builds a rank's trainer, metrics and connection to the rollout manager, and runs the
  loop until the run ends.
- rank_zero: work that rank 0 does for all ranks while the others wait.
- step_times: how the trainer spends the time of a step.
- stop: the request to stop a run between two steps, with a checkpoint.
"""

"""The loop that every trainer rank runs: train on a batch, publish the weights, save checkpoints.

- loop: the training loop. Version n is published when the trainer's step is n.
- manager_client: the trainer's calls to the rollout manager, each with a time limit.
- rank, sft_rank, score_rank: entry points of a rank that torchrun starts.
- attempt: exit code and failure message of a rank; restarts of all ranks by torchrun, counted and
  reported.
- assembly: builds a rank's trainer, metrics and link to the rollout side, and runs the loop to its
  end.
- rank_zero: work that rank 0 does for all ranks while the others wait.
- stop: the request that a run stop between two steps, with a checkpoint.
"""

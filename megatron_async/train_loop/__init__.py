"""The loop of a trainer rank.

- loop: batch, step, weights, checkpoint. Version n is published when the trainer's step is n.
- manager_client: the calls to the rollout manager, every one with a limit.
- rank, sft_rank, score_rank: entry points of a rank under torchrun.
- attempt: a rank's exit code and sentence; restarts of all ranks by torchrun: their count, their
  causes and the warning.
- assembly: a rank's trainer, metrics and link, from the run directory to the run's outcome.
- rank_zero: work of rank 0 for all ranks while the others wait.
- stop: a run that is asked to stop ends between two steps, with a checkpoint.
"""

"""The loop of a trainer rank.

- loop: batch, step, weights, checkpoint. Version n is published when the trainer's step is n.
- manager_client: the calls to the rollout manager, every one with a limit.
- rank: the rank's entry point under torchrun. rank_exit: its exit code and sentence.
- rank_zero: work of rank 0 for all ranks while the others wait.
- stop: a run that is asked to stop ends between two steps, with a checkpoint.
"""

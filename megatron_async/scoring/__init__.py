"""Scores responses in separate processes, with a hard time limit on every score.

- interface: the protocol that a training run uses to score responses, and the kinds of failure.
- jobs: splits the scoring of responses into jobs, each for one reward, and adds up the scores.
- pool, autoscale: a pool of workers whose number follows the length of the queue. Each worker has
  one scorer process, which is a child of this process or of a process that a backend starts. One
  additional scorer process runs all asynchronous rewards.
- workers: the worker, which starts a scorer process, sends jobs to it, and restarts it when it
  hangs or dies.
- process, frames: the worker's handle of a scorer process, and the messages between the two.
- process_main: the program that a scorer process runs.
- identity: one line that identifies all rewards of a run.
- rewards: the user's own rewards and the built-in ones.
- sandbox: runs programs that are contained in responses.
"""

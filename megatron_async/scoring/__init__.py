"""Scores responses, in processes of their own and with a hard limit on every score.

- interface: what a run asks of its scorers; the ways in which a score fails.
- workers: a scorer process, started, asked again and replaced.
- pool, autoscale: as many workers as the queue needs, in this process or in those of a backend;
  one for asynchronous rewards. jobs: what a worker gets, and its scores.
- process, frames: a scorer's process as its worker sees it, and the frames between the two.
- process_main: the program of that process.
- identity: a description of all that gives a run's rewards.
- rewards: the user's own rewards and the built-in ones. sandbox: where programs of responses run.
"""

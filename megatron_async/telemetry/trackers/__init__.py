"""Trackers: places besides `metrics.jsonl` that a run's numbers and samples go to.

- base: the interface, a class to derive from, and a tracker behind a queue, so that it can neither
  delay nor stop a run. build: from settings to trackers.
- tensorboard, weights_and_biases, mlflow_server: the built-in ones.
"""

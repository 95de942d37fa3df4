"""Passes a run's numbers and samples to services in addition to `metrics.jsonl`.

- base: the interface, a class to derive from; and a tracker behind a queue, so that it can neither
  delay nor stop a run.
- build: creates the trackers of the settings.
- tensorboard, weights_and_biases, mlflow_server: the built-in trackers.
"""

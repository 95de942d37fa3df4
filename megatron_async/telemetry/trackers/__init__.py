"""Passes a run's numbers and samples to services in addition to `metrics.jsonl`.

- base: the base class of trackers, and a wrapper that calls a tracker from a queue, so that the
  tracker can neither delay nor stop a run.
- build: creates the trackers that `telemetry.trackers` names.
- tensorboard, weights_and_biases, mlflow_server: the built-in trackers.
"""

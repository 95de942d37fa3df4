"""Telemetry: metrics, trackers, warnings and progress of a run.

- metrics: `metrics.jsonl`; readers see the surviving lineage.
- trackers: TensorBoard, W&B, MLflow and the user's own.
- health, learning: warnings from a run's own metrics, each named once while it lasts.
- progress: lines and a live status while a run goes on.
- summary: totals of a run.
"""

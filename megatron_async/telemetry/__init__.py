"""Records and shows what a run does: metrics, trackers, warnings and progress.

- metrics: writes and reads `metrics.jsonl`; readers get the surviving lineage.
- trackers: TensorBoard, W&B, MLflow and user-defined trackers.
- health, learning: warnings from a run's own metrics, each emitted once while its cause lasts.
- progress: lines and a live status on the console during a run.
- summary: totals of a run.
"""

"""Records and shows what a run does: metrics, trackers, warnings and progress.

- metrics: writes and reads `metrics.jsonl`. Readers do not get steps that a resume has abandoned.
- trackers: TensorBoard, W&B, MLflow and user-defined trackers.
- health: emits a warning once when a condition on the metrics starts to hold.
- learning: the conditions that concern the metrics of single steps.
- progress: lines and a live status on the console during a run.
- summary: totals of a run.
"""

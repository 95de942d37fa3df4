"""Telemetry: progress, TensorBoard, metrics, warnings and the report.

- metrics: `metrics.jsonl`; readers see the surviving lineage.
- trackers: TensorBoard, W&B, MLflow and the user's own.
- health, learning: warnings from a run's own metrics, each named once while it lasts.
- progress: lines and a live status while a run goes on.
- trace: the life of every request, from recorded events.
- summary, report_data, report_page, report_panels: totals of a run, and its page of figures.
"""

"""What a person sees: progress, TensorBoard, metrics, warnings and the report.

- metrics: `metrics.jsonl` and TensorBoard; readers see the surviving lineage.
- health, learning: warnings from a run's own metrics, each named once while it lasts.
- progress: lines and a live status while a run goes on.
- summary, report_data, report_page, report_panels: totals of a run, and its page of figures.
"""

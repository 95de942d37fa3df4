"""Telemetry: progress, TensorBoard, metrics and the run report."""

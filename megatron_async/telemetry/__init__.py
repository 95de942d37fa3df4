"""What a person sees: progress, TensorBoard, metrics and the run report."""

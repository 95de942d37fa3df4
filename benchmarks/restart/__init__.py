"""Measures the costs of killing all processes of a run and resuming it."""

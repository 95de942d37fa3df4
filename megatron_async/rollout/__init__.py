"""Runs the scheduler against engines, verifiers and the store."""

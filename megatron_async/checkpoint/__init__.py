"""Checkpoints of the trainer: sharded, verified, finalised by a manifest, loadable elsewhere.

Nothing is imported here: who only looks for a manifest must not wait for the trainer's packages.
"""

"""Trajectories, packed batches and the durable store."""

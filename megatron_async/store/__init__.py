"""The durable trajectory store of a run."""

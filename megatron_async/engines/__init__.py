"""Inference engines: the client protocol and the servers behind it."""

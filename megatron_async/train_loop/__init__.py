"""The loop of a trainer rank."""

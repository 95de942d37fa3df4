"""The ways in which a policy version reaches the engines."""

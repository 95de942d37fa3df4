"""Crash test of a whole run: random kills, and an account of what they cost."""

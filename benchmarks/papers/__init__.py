"""One script per experiment that the five sources describe, each with its negative control."""

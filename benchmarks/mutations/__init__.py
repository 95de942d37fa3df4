"""Mutation check: does the suite notice what was once wrong, or may be wrong in silence?

    python -m benchmarks.mutations [--only NAME] [--list]

Each mutation changes one place of one file in a temporary copy of the repository and runs the named
tests there, stopping at the first failure. A mutation is killed when a test fails; a mutation that
no test notices, or that makes the tests hang, is reported and makes the exit status 1.

`arithmetic` are one-place mistakes in algorithms, packing and checkpoints; `gpu_readiness` takes
back, one by one, what had to be mended before a first run on GPUs.
"""

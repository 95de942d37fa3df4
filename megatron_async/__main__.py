"""Runs the command `megatron-async` for `python -m megatron_async`."""

from megatron_async.cli import main

if __name__ == "__main__":
    main()

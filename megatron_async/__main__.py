"""`python -m megatron_async` is the command `megatron-async`."""

from megatron_async.cli import main

if __name__ == "__main__":
    main()

"""The sandbox for programs that responses bring along.

- sandbox: programs under limits, apart from everything else where the system lets it.
- launcher: the process between a scorer and such a program; it ends what the program leaves.
"""

from megatron_async.scoring.sandbox.sandbox import Outcome, Sandbox, SandboxError

__all__ = ["Outcome", "Sandbox", "SandboxError"]

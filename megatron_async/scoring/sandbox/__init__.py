"""Runs programs that are contained in responses, with limits and isolated from the machine.

- sandbox: runs a program with limits of time, memory, output and processes, and in separate
  namespaces if the operating system permits them.
- launcher: the process between a scorer process and such a program; it sets up the isolation, and
  kills the processes that the program leaves.
"""

from megatron_async.scoring.sandbox.sandbox import Outcome, Sandbox, SandboxError

__all__ = ["Outcome", "Sandbox", "SandboxError"]

"""The sandbox for programs that responses bring along."""

from megatron_async.tasks.sandbox.sandbox import Outcome, Sandbox, SandboxError

__all__ = ["Outcome", "Sandbox", "SandboxError"]

"""Gate for the tokens of one engine, by policy version.

An engine may generate as soon as it has been sent a version, so that it does not idle while the
trainer verifies it. What it generates meanwhile waits here, in the order in which it came; if the
verification fails, the streams are cancelled and nothing of it was kept (docs/weights.md).

Invariants
- No token passes under a version that the engine was not sent, or that has not been verified there.
- Whoever waits is let through by `accept`, or gets False when the engine is given up.
"""

from __future__ import annotations

import asyncio

from megatron_async.trajectory.types import PolicyVersion


class VersionGate:
    """A gate for one engine, made anew when it is sent weights again after a failed check."""

    def __init__(self) -> None:
        self._accepted: set[PolicyVersion] = set()
        self._expected: PolicyVersion | None = None
        self._open = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Return whether tokens of the newest version wait for its verification."""
        return self._expected is not None and self._expected not in self._accepted

    def expect(self, version: PolicyVersion) -> None:
        """The engine was sent this version; its tokens wait from now on."""
        if version not in self._accepted:
            self._expected = version
            self._open.clear()

    def accept(self) -> None:
        """Open for the version that was sent last: it is verified."""
        if self._expected is not None:
            self._accepted.add(self._expected)
            self._open.set()

    def give_up(self) -> None:
        """The engine is given up: nobody waits for its verification any more."""
        self._expected = None
        self._open.set()

    async def passes(self, version: PolicyVersion) -> bool:
        """True once tokens of `version` are accepted; False if they never will be."""
        if version == self._expected and version not in self._accepted:
            await self._open.wait()
        return version in self._accepted

"""Whose turn it is on devices that engines share with the trainer (`engines.placement: colocated`).

The trainer's calls tell: a batch that is handed out, or a checkpoint's position that is asked for,
means that it is about to train; a weight update, that it holds nothing but weights; the end of the
update, that it holds nothing.

Invariants
- Engines rest from the moment in which the trainer is told to go on until it says that its memory
  is free: never are both awake.
- A resting engine runs nothing; requests that were interrupted go on when it wakes.
- With devices of their own (`shared` false) nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from megatron_async.engines.interface import EngineClient

Tell = Callable[
    [Iterable[EngineClient], Callable[[EngineClient], Awaitable[None]]], Awaitable[None]
]


class SharedDevices:
    """Puts engines to rest and wakes them; `tell` asks all of them, and drops those that fail."""

    def __init__(self, shared: bool, tell: Tell) -> None:
        self._shared = shared
        self._tell = tell
        self._resting: set[str] = set()

    @property
    def shared(self) -> bool:
        """Whether engines and trainer alternate at all."""
        return self._shared

    async def rest(self, engines: Iterable[EngineClient]) -> None:
        """The trainer's turn. An engine that rests already is left alone."""

        async def put_to_rest(engine: EngineClient) -> None:
            await engine.pause("retract")
            await engine.release_memory()
            self._resting.add(engine.engine_id)

        if self._shared:
            awake = [engine for engine in engines if engine.engine_id not in self._resting]
            await self._tell(awake, put_to_rest)

    async def take_weights(self, engines: Iterable[EngineClient]) -> None:
        """Memory for the weights that are about to be sent; the engines go on resting."""
        if self._shared:
            await self._tell(
                [engine for engine in engines if engine.engine_id in self._resting],
                lambda engine: engine.resume_memory(weights_only=True),
            )

    async def wake(self, engines: Iterable[EngineClient]) -> None:
        """The engines' turn: the trainer holds nothing."""

        async def wake_up(engine: EngineClient) -> None:
            await engine.resume_memory(weights_only=False)
            await engine.resume()
            self._resting.discard(engine.engine_id)

        if self._shared:
            await self._tell(
                [engine for engine in engines if engine.engine_id in self._resting], wake_up
            )

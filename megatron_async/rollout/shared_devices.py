"""Turns on devices that engines share with the trainer (`engines.placement: colocated`).

The trainer's calls show it: a batch handed out, or a checkpoint's position that is asked for,
means that it is about to train; a weight update, that it holds nothing but weights; the end of the
update, that it holds nothing.

Invariants
- Engines are offloaded from the moment in which the trainer may go on until it reports that its
  memory is free: never do both hold it.
- An offloaded engine runs nothing; requests that were interrupted go on when it is back.
- With devices of their own (`shared` false) nothing here does anything.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from megatron_async.engines.interface import EngineClient

Ask = Callable[[Sequence[EngineClient], Callable[[EngineClient], Awaitable[None]]], Awaitable[None]]


class SharedDevices:
    """Offloads engines and loads them again; `ask` asks and drops those that fail."""

    def __init__(self, shared: bool, ask: Ask) -> None:
        self.shared = shared
        self._ask = ask
        self._offloaded: dict[str, bool] = {}  # whether it has memory for its weights

    async def offload(self, engines: Iterable[EngineClient], *, keep_weights: bool = False) -> None:
        """Free the devices for the trainer. `keep_weights`: it needs room for its weights only."""

        async def offload_one(engine: EngineClient) -> None:
            await engine.pause("retract")
            await engine.release_memory(keep_weights=keep_weights)
            self._offloaded[engine.engine_id] = keep_weights

        if self.shared:
            # An offloaded one may hold its weights still.
            done = {e for e, weights in self._offloaded.items() if keep_weights or not weights}
            await self._ask([e for e in engines if e.engine_id not in done], offload_one)

    async def onload_weights(self, engines: Iterable[EngineClient]) -> None:
        """Memory for the weights that are about to be sent; the engines stay offloaded."""

        async def take(engine: EngineClient) -> None:
            await engine.resume_memory(weights_only=True)
            self._offloaded[engine.engine_id] = True

        await self._ask([e for e in engines if e.engine_id in self._offloaded], take)

    async def onload(self, engines: Iterable[EngineClient]) -> None:
        """Let the engines take all their memory; the trainer holds nothing there."""

        async def take_all(engine: EngineClient) -> None:
            await engine.resume_memory(weights_only=False)
            await engine.resume()
            del self._offloaded[engine.engine_id]

        await self._ask([e for e in engines if e.engine_id in self._offloaded], take_all)

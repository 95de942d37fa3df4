"""Alternates the use of devices between engines and trainer if they share them
(`engines.placement: colocated`).

The manager knows from the trainer's calls what the trainer has on the devices. When it gets a batch
or asks for the store's position for a checkpoint, it is about to use the devices. When it starts a
weight update, it has only its weights on them. When it ends the update, it has released all its
device memory.

Invariants
- Engines are offloaded before a call returns after which the trainer uses the devices, and they are
  loaded again only after a call that says that the trainer's memory is free. Both have device
  memory at the same time only during a weight update and its verification, when the engines have
  memory for their weights.
- An offloaded engine processes no request. It resumes its interrupted requests when it is loaded
  again.
- With separate devices (`shared` is false), nothing in this module has an effect.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from megatron_async.engines.interface import EngineClient

Ask = Callable[[Sequence[EngineClient], Callable[[EngineClient], Awaitable[None]]], Awaitable[None]]


class SharedDevices:
    """Offloads engines from the devices that they share with the trainer, and loads them again.

    Attributes:
        shared: Whether engines and trainer share devices.
    """

    def __init__(self, shared: bool, ask: Ask) -> None:
        self.shared = shared
        self._ask = ask
        # For each offloaded engine, by id: whether its weights have device memory all the same,
        # because the engine kept it or allocated it again for an update.
        self._offloaded: dict[str, bool] = {}

    async def offload(self, engines: Iterable[EngineClient], *, keep_weights: bool = False) -> None:
        """Pause engines and release their device memory, so that the trainer can use the devices.

        Args:
            keep_weights: Whether the engines keep their weights in device memory.
        """

        async def offload_one(engine: EngineClient) -> None:
            await engine.pause("retract")
            await engine.release_memory(keep_weights=keep_weights)
            self._offloaded[engine.engine_id] = keep_weights

        if self.shared:
            # Leave out engines that are offloaded as far as needed. An offloaded engine whose
            # weights still have device memory must release it now, unless `keep_weights` allows it.
            done = {e for e, weights in self._offloaded.items() if keep_weights or not weights}
            await self._ask([e for e in engines if e.engine_id not in done], offload_one)

    async def onload_weights(self, engines: Iterable[EngineClient]) -> None:
        """Allocate device memory for the weights of offloaded engines, before an update; the
        engines stay paused."""

        async def allocate_weights(engine: EngineClient) -> None:
            await engine.resume_memory(weights_only=True)
            self._offloaded[engine.engine_id] = True

        await self._ask([e for e in engines if e.engine_id in self._offloaded], allocate_weights)

    async def onload(self, engines: Iterable[EngineClient]) -> None:
        """Allocate all device memory of offloaded engines and let them continue. Call this only
        when the trainer uses no device memory."""

        async def allocate_all(engine: EngineClient) -> None:
            await engine.resume_memory(weights_only=False)
            await engine.resume()
            del self._offloaded[engine.engine_id]

        await self._ask([e for e in engines if e.engine_id in self._offloaded], allocate_all)

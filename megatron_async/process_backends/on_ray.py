"""Provides the Ray process backend: objects in Ray actors, on any node of a cluster.

In a launch on several machines, each trainer machine is also a node of the Ray cluster, because a
process can use a cluster only through a node on its own machine. The launcher
(`launcher/node.py`) gives these nodes a label, which keeps actors off them. In a cluster whose
nodes have no such label, actors may be placed on every node.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayActorError,
    RayError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_async.errors import ComponentFailure, one_line
from megatron_async.process_backends.backend import (
    UNLIMITED,
    MethodCall,
    RemoteObjectDead,
    RemoteObjectLost,
    T,
)
from megatron_async.process_backends.ray_cluster import join_ray, ray_directory, start_ray
from megatron_async.process_backends.remote_object import HostedObject, RemoteCalls, request_of
from megatron_async.runtime.time_limits import AwakeTimeout

ROLE_LABEL: Final = "megatron-async-role"
TRAINER_ROLE: Final = "trainer"
_NOT_ON_TRAINER_NODES: Final = {ROLE_LABEL: f"!{TRAINER_ROLE}"}
# A process that did not start an actor cannot tell whether Ray is going to restart a dead actor.
# An actor that is still dead after this time in seconds counts as one that is not restarted.
_DEAD_SECONDS: Final = 15.0


@contextmanager
def ray_backend(
    address: str | None, token_file: Path | None = None, gpus: str | None = None
) -> "Iterator[RayBackend]":
    """Join or start a Ray cluster for the block, as a process backend; leave it at the end.

    Args:
        address: Address of the Ray cluster to join. None to start a cluster on this machine, which
            ends with the block.
        token_file: File for the token of a started cluster; removed at the end.
        gpus: GPUs of a started cluster (see `start_ray`).
    """
    try:
        if address is not None:
            join_ray(address)
        else:
            assert token_file is not None
            address = start_ray(token_file, gpus)
        yield RayBackend(address)
    finally:
        ray.shutdown()
        if token_file is not None:
            token_file.unlink(missing_ok=True)


class RayBackend:
    """Process backend of a Ray cluster that this process has joined."""

    one_machine = False

    def __init__(self, address: str) -> None:
        """Use the joined Ray cluster at `address`."""
        self.address = f"ray:{address}"

    @classmethod
    def joined(cls, address: str) -> "RayBackend":
        """Join the Ray cluster at `address`, and return its backend.

        Raises:
            ComponentFailure: The cluster cannot be joined.
        """
        join_ray(address)
        return cls(address)

    def start(
        self,
        what: Callable[..., T],
        *arguments: Any,
        name: str,
        restarts: int = 0,
        gpus: int = 0,
        here: bool = False,
    ) -> "RayRemoteObject[T]":
        options: dict[str, Any] = {"label_selector": _NOT_ON_TRAINER_NODES}
        if here:
            node = ray.get_runtime_context().get_node_id()
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"name": name, "scheduling_strategy": strategy}
        # Give the class the name of `what`, because Ray shows it in the list of processes.
        named = ray.remote(type(what.__name__, (HostedObject,), {}))
        actor = named.options(
            num_cpus=0,
            num_gpus=gpus,
            enable_task_events=False,  # Otherwise, gcs_server keeps 3 KiB for every call.
            max_restarts=-1 if restarts == UNLIMITED else restarts,
            **options,
        )
        return RayRemoteObject(name, actor.remote(what, *arguments))

    def find(self, name: str, what: Callable[..., T]) -> "RayRemoteObject[T]":
        return RayRemoteObject(name)

    def close(self) -> None:
        ray.shutdown()


def lost_node_of(role: str) -> str | None:
    """Return the address of a node with the label `role` that has left the Ray cluster.

    None if all nodes with this role are alive.
    """
    for node in ray.nodes():
        if not node["Alive"] and node["Labels"].get(ROLE_LABEL) == role:
            return str(node["NodeManagerAddress"])
    return None


class RayRemoteObject(RemoteCalls[T]):
    """Handle to an object in a Ray actor (implements `RemoteObject`)."""

    def __init__(self, name: str, actor: Any = None) -> None:
        """Create a handle; without `actor`, the actor is looked up by `name` at the first call."""
        super().__init__(name, f"{ray_directory()} on its node")
        self._actor = actor
        self._patience = 0.0 if actor is not None else _DEAD_SECONDS
        self._dead_since: float | None = None

    async def _called(self, call: MethodCall, limit: float) -> Any:
        try:
            reply = self._begin(call)
            async with AwakeTimeout(limit):
                return self._result(await reply, call)
        except TimeoutError as error:
            raise self._late(call, limit) from error
        except RayError as error:
            raise self._failed(call.method, error) from error

    def end(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)

    def _begin(self, call: MethodCall) -> Any:
        """Send `call` to the actor, and return Ray's reference to the reply.

        Raises:
            RemoteObjectLost: No actor has the object's name.
        """
        if self._actor is None:
            try:
                self._actor = ray.get_actor(self._name)
            except ValueError as error:
                raise RemoteObjectLost(
                    f"{self._name} does not exist: it is not started yet, or dead"
                ) from error
        return self._actor.handle.remote(request_of(call))

    def _failed(self, method: str, error: RayError) -> ComponentFailure:
        """Convert Ray's `error` in a call of `method` to an error class of megatron_async."""
        if not isinstance(error, RayActorError):
            return ComponentFailure(f"{self._name}: failed to call {method}: {one_line(error)}")
        message = f"{self._name} has died during the call `{method}`: {one_line(error)}"
        if isinstance(error, ActorUnavailableError) or not isinstance(error, ActorDiedError):
            self._dead_since = None
            return RemoteObjectLost(message)
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        dead = now - self._dead_since >= self._patience
        return RemoteObjectDead(message) if dead else RemoteObjectLost(message)

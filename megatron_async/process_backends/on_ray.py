"""The Ray place: each object is an actor, on any node of a cluster.

A trainer node of a launch is a Ray node too, because a process can talk to a Ray cluster only
through a node on its own machine. It carries a label, and nothing is placed there. In a cluster
without labels the selector matches every node.
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
# To who did not start it, a dead actor whose restart Ray has not begun yet looks dead for good.
_DEAD_SECONDS: Final = 15.0


@contextmanager
def ray_backend(
    address: str | None, token_file: Path | None = None, gpus: str | None = None
) -> "Iterator[RayBackend]":
    """The Ray cluster at `address`; None: one on this machine, ended with the block.

    `token_file`, `gpus`: of that one (see `start_ray`).
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
    """A Ray cluster that this process has joined (`Place`)."""

    one_machine = False

    def __init__(self, address: str) -> None:
        self.address = f"ray:{address}"

    @classmethod
    def joined(cls, address: str) -> "RayBackend":
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
        # Ray shows the class in the list of processes.
        shown = ray.remote(type(what.__name__, (HostedObject,), {}))
        actor = shown.options(
            num_cpus=0,
            num_gpus=gpus,
            enable_task_events=False,  # gcs_server keeps 3 KiB of every call otherwise
            max_restarts=-1 if restarts == UNLIMITED else restarts,
            **options,
        )
        return RayRemoteObject(name, actor.remote(what, *arguments))

    def find(self, name: str, what: Callable[..., T]) -> "RayRemoteObject[T]":
        return RayRemoteObject(name)

    def close(self) -> None:
        ray.shutdown()


def lost_node_of(role: str) -> str | None:
    """The address of a node with this role that has left the cluster; None where none has."""
    for node in ray.nodes():
        if not node["Alive"] and node["Labels"].get(ROLE_LABEL) == role:
            return str(node["NodeManagerAddress"])
    return None


class RayRemoteObject(RemoteCalls[T]):
    """An object in an actor (`Placed`); `actor`: None until it is found by its name."""

    def __init__(self, name: str, actor: Any = None) -> None:
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
        if self._actor is None:
            try:
                self._actor = ray.get_actor(self._name)
            except ValueError as error:
                raise RemoteObjectLost(
                    f"{self._name} is not there: not started yet, or dead"
                ) from error
        return self._actor.handle.remote(request_of(call))

    def _failed(self, method: str, error: RayError) -> ComponentFailure:
        if not isinstance(error, RayActorError):
            return ComponentFailure(f"{self._name} cannot be asked {method}: {one_line(error)}")
        message = f"{self._name} has died (waiting for {method}): {one_line(error)}"
        if isinstance(error, ActorUnavailableError) or not isinstance(error, ActorDiedError):
            self._dead_since = None
            return RemoteObjectLost(message)
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        dead = now - self._dead_since >= self._patience
        return RemoteObjectDead(message) if dead else RemoteObjectLost(message)

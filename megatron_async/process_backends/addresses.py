"""Connects to a process backend by its address, from a process that did not open the backend."""

from pathlib import Path

from megatron_async.process_backends.backend import ProcessBackend


def connect_backend(address: str, logs: Path) -> ProcessBackend:
    """Connect to the process backend at `address`, and return it.

    Args:
        address: The `address` of a backend that another process opened: `local:` and its directory,
            or `ray:` and the address of the Ray cluster.
        logs: Folder for logs of the processes that this process starts. Only a local backend uses
            it.

    Raises:
        ComponentFailure: The Ray cluster cannot be reached.
    """
    kind, _, where = address.partition(":")
    if kind == "local":
        from megatron_async.process_backends.local import LocalBackend

        return LocalBackend(Path(where), logs)
    from megatron_async.process_backends.on_ray import RayBackend

    return RayBackend.joined(where)

"""Finds a place again, in another process than the one that has opened it."""

from pathlib import Path

from megatron_async.process_backends.backend import ProcessBackend


def connect_backend(address: str, logs: Path) -> ProcessBackend:
    """The place at an address that another process has opened. `logs`: for what is started here.

    Raises ComponentFailure when it cannot be reached.
    """
    kind, _, where = address.partition(":")
    if kind == "local":
        from megatron_async.process_backends.local import LocalBackend

        return LocalBackend(Path(where), logs)
    from megatron_async.process_backends.on_ray import RayBackend

    return RayBackend.joined(where)

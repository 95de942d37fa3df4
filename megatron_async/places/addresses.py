"""Finds a place again, in another process than the one that has opened it."""

from pathlib import Path

from megatron_async.places.place import Place


def place_at(address: str, logs: Path) -> Place:
    """The place at an address that another process has opened. `logs`: for what is started here.

    Raises ComponentFailure when it cannot be reached.
    """
    kind, _, where = address.partition(":")
    if kind == "local":
        from megatron_async.places.local import LocalPlace

        return LocalPlace(Path(where), logs)
    from megatron_async.places.on_ray import RayPlace

    return RayPlace.joined(where)

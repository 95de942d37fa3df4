"""A batch as the scheduler has emitted it and the trainer gets it, by a run's settings."""

from collections.abc import Mapping, Sequence

from megatron_async.config import RunConfig
from megatron_async.scheduler.events import EmitBatch
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.types import Group


def packed_as(
    config: RunConfig,
    emitted: EmitBatch,
    groups: Sequence[Group],
    lineage: int,
    branch_points: Mapping[int, int],
) -> TokenBatch:
    """Pack the emitted groups; `branch_points` as in `pack_groups`."""
    return pack_groups(
        groups,
        step=emitted.step,
        lineage=lineage,
        branch_points=branch_points,
        temperature=config.sampling.temperature,
        mask_before=emitted.mask_before,
        discount=config.environment.turn_discount,
    )

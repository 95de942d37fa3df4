"""State of a trainer as named tensors: taken for a save, put back at any layout.

For each parameter there are these tensors, each in the optimizer's precision: `weights/NAME` (the
float32 copy where the model itself has half precision: the model's values are its roundings), of
Adam `exp_avg/NAME` and `exp_avg_sq/NAME`, of Muon `momentum_buffer/NAME`.

Invariants
- A rank describes views of what it holds; nothing is gathered, at a save or at a load. Over all
  ranks each element is saved exactly once: with the distributed optimizer by the rank that owns it,
  without it data-parallel ranks share the work evenly.
- Nothing depends on how Megatron pads or orders its buffers: a run of elements has its place from
  the parameter's name and shape alone.
- Hyperparameters are the configuration's, not the checkpoint's.
- Where the weights alone are loaded, every file is verified before the first value is read (ranks
  share the reading), so that nothing is half loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_async.checkpoint.checksum import (
    TensorTally,
    check_tensor,
    checksum,
    compare,
    dtype_named,
    signed,
    tally,
)
from megatron_async.checkpoint.collective import corrupt_on_all, shared_faults
from megatron_async.checkpoint.files import PieceReader
from megatron_async.checkpoint.manifest import (
    ADAM,
    MOMENTUM,
    WEIGHTS,
    Checkpoint,
    CorruptCheckpoint,
    SavedLayout,
    TensorRecord,
    open_checkpoint,
)
from megatron_async.checkpoint.placement import Box, ParameterId, boxes, exported, tensor_shapes
from megatron_async.checkpoint.random_state import load_random_state
from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture
from megatron_async.models.parameters import PlacedParameter, placed_parameters, unwrap
from megatron_async.models.shards import ShardLayout
from megatron_async.trajectory.types import PolicyVersion


class Checkpointable(Protocol):
    """The interface of a trainer that can be saved. `progress` is a small JSON object."""

    wrapped: DistributedDataParallel
    optimizer: ChainedOptimizer

    @property
    def version(self) -> PolicyVersion: ...

    def progress(self) -> Mapping[str, Any]: ...

    def restore_progress(self, progress: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A part of a tensor, its place in it, and the whole tensor's shape. `values` is a view."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    values: Tensor

    def checksum(self) -> Tensor:
        return checksum(self.values, self.offsets, self.shape)


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """A run of a parameter's elements that this rank holds, of one of the tensors it has.

    Elements that no box covers are padding, and zero. `counts`: this rank's copy is the one that is
    saved; what equals it on other ranks is left out.
    """

    name: str
    shape: tuple[int, ...]
    flat_N: Tensor
    begin: int
    boxes: Sequence[Box]
    counts: bool

    def pieces(self) -> Iterator[TensorPiece]:
        for box in self.boxes:
            run_N = self.flat_N[box.begin - self.begin : box.end - self.begin]
            yield TensorPiece(self.name, box.offsets, self.shape, run_N.view(box.shape))


def current_layout() -> SavedLayout:
    """The layout of Megatron's parallel state."""
    return SavedLayout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
    )


# ---------------------------------------------------------------- what there is


@dataclass(frozen=True, eq=False)
class _Run:
    """The elements [begin, end) of a parameter whose optimizer state this rank holds."""

    parameter: Tensor
    begin: int
    end: int
    master: Tensor
    moments: Mapping[str, Tensor]
    replicas: bool  # whether the other data-parallel ranks hold the same

    @property
    def model_N(self) -> Tensor:
        """The same elements in the model."""
        return self.parameter.detach().view(-1)[self.begin : self.end]

    @property
    def aliases(self) -> bool:
        """Return whether the optimizer works on the model's own values."""
        return self.master.data_ptr() == self.model_N.data_ptr()


def _runs(trainer: Checkpointable) -> Iterator[_Run]:
    """Walk the state of Megatron's optimizers on this rank; each part has one of two forms."""
    model_of = {id(getattr(p, "main_param", p)): p for p in trainer.wrapped.parameters()}
    for part in trainer.optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        state = part.optimizer.state
        if isinstance(part, DistributedOptimizer):
            for parameter in part.model_param_gbuf_map:
                span = part._get_model_param_range_map(parameter)["param"]
                group, order = part.model_param_group_index_map[parameter]
                master = part.optimizer.param_groups[group]["params"][order]
                yield _Run(parameter, span.start, span.end, master, state[master], False)
            continue
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                parameter = model_of[id(master)]
                yield _Run(parameter, 0, parameter.numel(), master, state[master], True)


def _placed(trainer: Checkpointable) -> dict[int, PlacedParameter]:
    model = unwrap(trainer.wrapped)
    return {id(p.parameter): p for p in placed_parameters([model], model.architecture)}


def held_shards(trainer: Checkpointable) -> Iterator[ParameterShard]:
    """All of this rank's optimizer state and the weights that belong to it."""
    yield from _shards(trainer, whole=True)


def saved_shards(trainer: Checkpointable) -> Iterator[ParameterShard]:
    """This rank's part of a save: over all ranks, each element once."""
    yield from (shard for shard in _shards(trainer, whole=False) if shard.counts)


def tensor_names(trainer: Checkpointable) -> frozenset[str]:
    """Return the names of the tensors that all ranks together save."""
    muon = any(MOMENTUM in run.moments for run in _runs(trainer))
    architecture = unwrap(trainer.wrapped).architecture
    return frozenset(tensor_shapes(architecture, "muon" if muon else "adam"))


def _shards(trainer: Checkpointable, *, whole: bool) -> Iterator[ParameterShard]:
    placed, architecture = _placed(trainer), unwrap(trainer.wrapped).architecture
    for run in _runs(trainer):
        place = placed[id(run.parameter)]
        begin, end = run.begin, run.end
        if run.replicas and not whole:
            begin, end = _share(end, *replicas(place))
        parameter_id = parameter_id_of(place, architecture)
        where = boxes(parameter_id, place.size, place.rank, begin, end)
        for state, flat in (
            (WEIGHTS, run.master),
            *((m, run.moments[m]) for m in (*ADAM, MOMENTUM) if m in run.moments),
        ):
            flat_N = flat.detach().view(-1)[begin - run.begin : end - run.begin]
            yield ParameterShard(
                f"{state}/{parameter_id.name}",
                parameter_id.shape,
                flat_N,
                begin,
                where,
                is_primary_copy(place),
            )


def _share(count: int, rank: int, size: int) -> tuple[int, int]:
    return count * rank // size, count * (rank + 1) // size


def parameter_id_of(place: PlacedParameter, architecture: Architecture) -> ParameterId:
    """Return the slot of a parameter in the whole model; of a tied head the embedding's."""
    return ParameterId(exported(architecture, place.rule), place.layer, place.expert)


def replicas(place: PlacedParameter) -> tuple[int, int]:
    """This rank's number among those that hold the same shard by data parallelism, and theirs."""
    if place.rule.expert:
        return (
            parallel_state.get_expert_data_parallel_rank(),
            parallel_state.get_expert_data_parallel_world_size(),
        )
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def is_primary_copy(place: PlacedParameter) -> bool:
    """Return whether it is no copy (a tied head, or what every tensor rank holds whole)."""
    copied = place.rule.layout is ShardLayout.REPLICATED and place.rank > 0
    return place.rule.exported and not copied


def check_rounding(trainer: Checkpointable) -> None:
    """The model's values are what a load would make of the optimizer's. Raises CorruptCheckpoint.

    In float32 they are the same memory.
    """
    for run in _runs(trainer):
        rounded_N = run.model_N if run.aliases else run.master.detach().view(-1).to(run.model_N)
        if not torch.equal(rounded_N.view(torch.uint8), run.model_N.view(torch.uint8)):
            raise CorruptCheckpoint(
                f"parameter {_placed(trainer)[id(run.parameter)].name} is not what the optimizer's "
                "copy of it rounds to"
            )


# ---------------------------------------------------------------- putting it back


def load_state(
    trainer: Checkpointable,
    checkpoint: Checkpoint,
    *,
    with_random: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective. Weights, optimizer state and, if asked, this rank's random states.

    Raises CorruptCheckpoint, on every rank alike.
    """
    tensors = checkpoint.manifest.tensors
    with corrupt_on_all(group):
        with PieceReader(checkpoint.path, checkpoint.manifest.files) as reader:
            for shard in held_shards(trainer):
                load_shard(shard, reader, tensors)
        if with_random:
            load_random_state(checkpoint.path, dist.get_rank())
    broadcast_weights(trainer)
    tallies: dict[str, TensorTally] = {}
    for shard in saved_shards(trainer):
        count(tallies, shard)
    verify(tensors, tallies, group)


def load_checkpoint_weights(model: Any, path: Path) -> None:
    """Fill `model` (a rank's chunk, unwrapped) with the weights alone: a new run's starting point.

    Collective. The checkpoint may be of any layout and precision; the parameters keep theirs.
    Beside the model, a rank holds one of its parameters in the checkpoint's precision. Raises
    UserError for a damaged or unfitting one.
    """
    checkpoint = open_checkpoint(path, "model.checkpoint", shared_faults)
    tensors = {
        name: record
        for name, record in checkpoint.manifest.tensors.items()
        if name.startswith(f"{WEIGHTS}/")
    }
    tallies: dict[str, TensorTally] = {}
    try:
        with (
            torch.no_grad(),
            corrupt_on_all(),
            PieceReader(checkpoint.path, checkpoint.manifest.files) as reader,
        ):
            for place in placed_parameters([model], model.architecture):
                shard = _weights_shard(place, model.architecture, tensors)
                load_shard(shard, reader, tensors)
                if shard.counts:
                    count(tallies, shard)
                place.parameter.copy_(shard.flat_N.view(place.parameter.shape))
        verify(tensors, tallies)
    except CorruptCheckpoint as error:
        raise UserError(
            f"model.checkpoint {path} does not fit the model of model.path: {error}"
        ) from error


def _weights_shard(
    place: PlacedParameter, architecture: Architecture, tensors: Mapping[str, TensorRecord]
) -> ParameterShard:
    """Room for this rank's part of a parameter, in the precision in which it is stored."""
    parameter_id = parameter_id_of(place, architecture)
    name, like = parameter_id.weights, place.parameter
    dtype = dtype_named(tensors[name].dtype) if name in tensors else like.dtype
    flat_N = torch.empty(like.numel(), dtype=dtype)
    where = boxes(parameter_id, place.size, place.rank)
    counts = is_primary_copy(place) and replicas(place)[0] == 0
    return ParameterShard(name, parameter_id.shape, flat_N, 0, where, counts)


def load_shard(
    shard: ParameterShard, reader: PieceReader, tensors: Mapping[str, TensorRecord]
) -> None:
    """Fill the tensor of `shard`. Raises CorruptCheckpoint."""
    check_tensor(tensors, shard.name, shard.shape)
    if sum(box.end - box.begin for box in shard.boxes) < shard.flat_N.numel():
        shard.flat_N.zero_()
    for piece in shard.pieces():
        reader.read(piece.name, piece.offsets, piece.values)


def broadcast_weights(trainer: Checkpointable) -> None:
    """Collective. The optimizer's weights into the model, on every data-parallel rank."""
    distributed = False
    for run in _runs(trainer):
        distributed |= not run.replicas
        if not run.aliases:
            run.model_N.copy_(run.master.view(-1))
    if distributed:
        trainer.wrapped.start_param_sync()


def count(tallies: dict[str, TensorTally], shard: ParameterShard) -> None:
    """Add a shard to what is known of its tensor."""
    for piece in shard.pieces():
        known = tally(tallies, piece.name, piece.shape, piece.values.dtype)
        known.add(int(piece.checksum()), piece.values.numel())


def verify(
    expected: Mapping[str, TensorRecord],
    tallies: Mapping[str, TensorTally],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective. What all ranks hold together is what the manifest lists, all of it, bit for bit.

    `tallies`: this rank's, each element on one rank. One sum over the ranks, of two numbers for
    each tensor. Raises CorruptCheckpoint, on every rank alike.
    """
    rows = {name: row for row, name in enumerate(sorted(expected))}
    found_N2 = torch.zeros(len(rows), 2, dtype=torch.int64)
    for name, known in tallies.items():
        found_N2[rows[name], 0] = signed(known.checksum)
        found_N2[rows[name], 1] = known.elements
    dist.all_reduce(found_N2, group=group)
    compare(
        expected,
        {
            name: TensorTally(expected[name].dtype, expected[name].shape, *found_N2[row].tolist())
            for name, row in rows.items()
        },
    )

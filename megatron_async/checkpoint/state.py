"""Describes a trainer's state as named tensors: determines which slices of them each rank saves,
and fills them from a checkpoint.

For each parameter there are tensors in the optimizer's precision. `weights/NAME` has the values; if
the model has half precision, these are the optimizer's float32 copies, of which the model's values
are roundings. Adam adds `exp_avg/NAME` and `exp_avg_sq/NAME`. In a run with Muon, the matrices that
Muon updates have `momentum_buffer/NAME` instead of Adam's tensors.

Invariants
- A rank saves and reads only views of its own memory; neither a save nor the reading of files
  gathers values of several ranks on one. Over all ranks each element is saved exactly once: with
  Megatron's distributed optimizer by the rank that owns it; otherwise data-parallel ranks, which
  all have the same state, divide the elements evenly.
- Nothing depends on how Megatron pads or orders its buffers: the index of an element in the whole
  tensor follows only from the parameter's name and shape.
- Hyperparameters of the optimizer come from the run's configuration and not from the checkpoint.
- If only the weights are loaded (`load_checkpoint_weights`), every file is verified before the
  first value is read, with the files divided over the ranks, so that no model is loaded in part.
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
from megatron_async.models.parameters import LocalParameter, local_parameters, unwrap
from megatron_async.models.shards import ShardLayout
from megatron_async.trajectory.types import PolicyVersion


class Checkpointable(Protocol):
    """Interface of a trainer that can be saved to a checkpoint and loaded from it.

    `progress` returns a small JSON object with the state other than tensors. It is stored in the
    checkpoint, and `restore_progress` is called with it after a load.
    """

    wrapped: DistributedDataParallel
    optimizer: ChainedOptimizer

    @property
    def version(self) -> PolicyVersion: ...

    def progress(self) -> Mapping[str, Any]: ...

    def restore_progress(self, progress: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A slice of a tensor of the checkpoint, on the rank that saves or loads it.

    Attributes:
        name: Name of the tensor.
        offsets: Index of the slice's first element in the whole tensor.
        shape: Shape of the whole tensor.
        values: The slice, a view of the rank's memory.
    """

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    values: Tensor

    def checksum(self) -> Tensor:
        """Return the checksum of the slice."""
        return checksum(self.values, self.offsets, self.shape)


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """Elements of one tensor of a parameter (its weights, or a moment of the optimizer) that this
    rank has, which are contiguous in the rank's flattened shard.

    Elements that are in no box are padding, and are zero.

    Attributes:
        name: Name of the tensor in the checkpoint.
        shape: Shape of the whole tensor.
        flat_N: The elements.
        begin: Number of the first of these elements in the rank's flattened shard.
        boxes: The rectangles of the whole tensor that the elements cover.
        is_saved: Whether this rank saves the elements; if other ranks have equal copies, only one
            rank does.
    """

    name: str
    shape: tuple[int, ...]
    flat_N: Tensor
    begin: int
    boxes: Sequence[Box]
    is_saved: bool

    def pieces(self) -> Iterator[TensorPiece]:
        """Generate the shard's slices, one for each box."""
        for box in self.boxes:
            span_N = self.flat_N[box.begin - self.begin : box.end - self.begin]
            yield TensorPiece(self.name, box.offsets, self.shape, span_N.view(box.shape))


def current_layout() -> SavedLayout:
    """Return the sizes of the parallel dimensions, from Megatron's parallel state in this
    process."""
    return SavedLayout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
    )


# ---------------------------------------------------------------- describing the state


@dataclass(frozen=True, eq=False)
class _Span:
    """The elements [begin, end) of this rank's flattened shard of a parameter, for which the rank
    has optimizer state.

    Attributes:
        parameter: This rank's shard of the parameter in the model.
        master: The optimizer's copy of these elements, or the elements themselves if it has no
            copy.
        moments: The optimizer's moments of these elements, by name.
        replicated: Whether other data-parallel ranks have the same state, as without the
            distributed optimizer.
    """

    parameter: Tensor
    begin: int
    end: int
    master: Tensor
    moments: Mapping[str, Tensor]
    replicated: bool

    @property
    def model_N(self) -> Tensor:
        """The span's elements in the model."""
        return self.parameter.detach().view(-1)[self.begin : self.end]

    @property
    def aliases(self) -> bool:
        """Whether the optimizer works on the model's own values instead of a copy."""
        return self.master.data_ptr() == self.model_N.data_ptr()


def _spans(trainer: Checkpointable) -> Iterator[_Span]:
    """Generate the spans of parameters for which Megatron's optimizers have state on this rank.

    Megatron may combine several optimizers. A distributed optimizer has parts of parameters, and an
    ordinary one has whole parameters.
    """
    model_of = {id(getattr(p, "main_param", p)): p for p in trainer.wrapped.parameters()}
    for chained in trainer.optimizer.chained_optimizers:
        if chained.is_stub_optimizer:
            continue
        state = chained.optimizer.state
        if isinstance(chained, DistributedOptimizer):
            for parameter in chained.model_param_gbuf_map:
                owned = chained._get_model_param_range_map(parameter)["param"]
                group, index = chained.model_param_group_index_map[parameter]
                master = chained.optimizer.param_groups[group]["params"][index]
                yield _Span(parameter, owned.start, owned.end, master, state[master], False)
            continue
        for group in chained.optimizer.param_groups:
            for master in group["params"]:
                parameter = model_of[id(master)]
                yield _Span(parameter, 0, parameter.numel(), master, state[master], True)


def _placed(trainer: Checkpointable) -> dict[int, LocalParameter]:
    """Return this rank's parameters with their sharding, by the `id()` of the parameter object."""
    model = unwrap(trainer.wrapped)
    return {id(p.parameter): p for p in local_parameters([model], model.architecture)}


def local_shards(trainer: Checkpointable) -> Iterator[ParameterShard]:
    """Generate the shards of this rank's optimizer state and of the weights that belong to it."""
    yield from _shards(trainer, whole=True)


def saved_shards(trainer: Checkpointable) -> Iterator[ParameterShard]:
    """Generate the shards that this rank saves. Over all ranks, each element occurs exactly
    once."""
    yield from (shard for shard in _shards(trainer, whole=False) if shard.is_saved)


def tensor_names(trainer: Checkpointable) -> frozenset[str]:
    """Return the names of the tensors that all ranks together save."""
    muon = any(MOMENTUM in span.moments for span in _spans(trainer))
    architecture = unwrap(trainer.wrapped).architecture
    return frozenset(tensor_shapes(architecture, "muon" if muon else "adam"))


def _shards(trainer: Checkpointable, *, whole: bool) -> Iterator[ParameterShard]:
    """Generate this rank's shards of weights and optimizer state.

    Args:
        whole: Whether to generate all elements of this rank. Otherwise, if other data-parallel
            ranks have the same state, only this rank's share of the elements is generated.
    """
    by_id, architecture = _placed(trainer), unwrap(trainer.wrapped).architecture
    for span in _spans(trainer):
        placed = by_id[id(span.parameter)]
        begin, end = span.begin, span.end
        if span.replicated and not whole:
            begin, end = _share(end, *replicas(placed))
        parameter_id = parameter_id_of(placed, architecture)
        where = boxes(parameter_id, placed.size, placed.rank, begin, end)
        for state, flat in (
            (WEIGHTS, span.master),
            *((m, span.moments[m]) for m in (*ADAM, MOMENTUM) if m in span.moments),
        ):
            flat_N = flat.detach().view(-1)[begin - span.begin : end - span.begin]
            yield ParameterShard(
                f"{state}/{parameter_id.name}",
                parameter_id.shape,
                flat_N,
                begin,
                where,
                is_primary_copy(placed),
            )


def _share(count: int, rank: int, size: int) -> tuple[int, int]:
    """Divide `count` elements evenly over `size` ranks; return the number of the first element of
    `rank`'s share, and the number after its last element."""
    return count * rank // size, count * (rank + 1) // size


def parameter_id_of(placed: LocalParameter, architecture: Architecture) -> ParameterId:
    """Return the id that a rank's parameter has in the whole model. An output head that shares its
    weights with the embedding has the embedding's id."""
    return ParameterId(exported(architecture, placed.rule), placed.layer, placed.expert)


def replicas(placed: LocalParameter) -> tuple[int, int]:
    """Return this rank's index among the data-parallel ranks that have the same shard of a
    parameter, and how many such ranks there are."""
    if placed.rule.expert:
        return (
            parallel_state.get_expert_data_parallel_rank(),
            parallel_state.get_expert_data_parallel_world_size(),
        )
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def is_primary_copy(placed: LocalParameter) -> bool:
    """Return whether a rank's parameter is the primary copy, which is saved, among equal copies in
    one replica of the model.

    An output head that shares its weights with the embedding is never the primary copy. If
    every tensor-parallel rank has a whole parameter, tensor-parallel rank 0 has the primary copy.
    """
    copied = placed.rule.layout is ShardLayout.REPLICATED and placed.rank > 0
    return placed.rule.exported and not copied


def check_rounding(trainer: Checkpointable) -> None:
    """Check that the model's values are equal to the optimizer's copies after rounding to the
    model's precision.

    Only the optimizer's copies are saved, and a load rounds them to get the model's values. If the
    optimizer has no copies, as in float32, there is nothing to compare.

    Raises:
        CorruptCheckpoint: If a parameter differs.
    """
    for span in _spans(trainer):
        rounded_N = span.model_N if span.aliases else span.master.detach().view(-1).to(span.model_N)
        if not torch.equal(rounded_N.view(torch.uint8), span.model_N.view(torch.uint8)):
            raise CorruptCheckpoint(
                f"parameter {_placed(trainer)[id(span.parameter)].name} differs from the "
                "optimizer's copy rounded to the model's precision"
            )


# ---------------------------------------------------------------- loading


def load_state(
    trainer: Checkpointable,
    checkpoint: Checkpoint,
    *,
    with_random: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load weights and optimizer state of a checkpoint into a trainer, and verify them. Collective.

    Args:
        with_random: Whether this rank's random states are loaded too.
        group: Process group of all ranks; None means the default group.

    Raises:
        CorruptCheckpoint: On every rank, if the checkpoint or the loaded values are not as saved.
    """
    tensors = checkpoint.manifest.tensors
    with corrupt_on_all(group):
        with PieceReader(checkpoint.path, checkpoint.manifest.files) as reader:
            for shard in local_shards(trainer):
                load_shard(shard, reader, tensors)
        if with_random:
            load_random_state(checkpoint.path, dist.get_rank())
    broadcast_weights(trainer)
    tallies: dict[str, TensorTally] = {}
    for shard in saved_shards(trainer):
        count(tallies, shard)
    verify(tensors, tallies, group)


def load_checkpoint_weights(model: Any, path: Path) -> None:
    """Fill a rank's `model` with the weights of the checkpoint at `path`, with which a new run
    starts; nothing else is loaded.

    Collective. The checkpoint may have been saved by any number of ranks and in any precision; the
    values are cast to the precision of the model's parameters. In addition to the model, each rank
    needs memory for one of its parameters at a time, in the checkpoint's precision.

    Args:
        model: The rank's part of the model, unwrapped.
        path: The directory of the checkpoint.

    Raises:
        UserError: If the checkpoint is damaged or does not fit the model.
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
            for placed in local_parameters([model], model.architecture):
                shard = _weights_shard(placed, model.architecture, tensors)
                load_shard(shard, reader, tensors)
                if shard.is_saved:
                    count(tallies, shard)
                placed.parameter.copy_(shard.flat_N.view(placed.parameter.shape))
        verify(tensors, tallies)
    except CorruptCheckpoint as error:
        raise UserError(
            f"model.checkpoint {path} does not fit the model of model.path: {error}"
        ) from error


def _weights_shard(
    placed: LocalParameter, architecture: Architecture, tensors: Mapping[str, TensorRecord]
) -> ParameterShard:
    """Allocate memory for this rank's shard of a parameter's weights, in the checkpoint's
    precision; return it as a shard to be filled."""
    parameter_id = parameter_id_of(placed, architecture)
    name, like = parameter_id.weights, placed.parameter
    dtype = dtype_named(tensors[name].dtype) if name in tensors else like.dtype
    flat_N = torch.empty(like.numel(), dtype=dtype)
    where = boxes(parameter_id, placed.size, placed.rank)
    is_saved = is_primary_copy(placed) and replicas(placed)[0] == 0
    return ParameterShard(name, parameter_id.shape, flat_N, 0, where, is_saved)


def load_shard(
    shard: ParameterShard, reader: PieceReader, tensors: Mapping[str, TensorRecord]
) -> None:
    """Fill the memory of `shard` with its values from the checkpoint, and its padding with zeros.

    Args:
        reader: Reads the files of the checkpoint.
        tensors: Records of the tensors in the checkpoint's manifest.

    Raises:
        CorruptCheckpoint: If the tensor is missing, has another shape, or cannot be read.
    """
    check_tensor(tensors, shard.name, shard.shape)
    if sum(box.end - box.begin for box in shard.boxes) < shard.flat_N.numel():
        shard.flat_N.zero_()
    for piece in shard.pieces():
        reader.read(piece.name, piece.offsets, piece.values)


def broadcast_weights(trainer: Checkpointable) -> None:
    """Copy the optimizer's weights into the model on every data-parallel rank. Collective."""
    distributed = False
    for span in _spans(trainer):
        distributed |= not span.replicated
        if not span.aliases:
            span.model_N.copy_(span.master.view(-1))
    if distributed:
        trainer.wrapped.start_param_sync()


def count(tallies: dict[str, TensorTally], shard: ParameterShard) -> None:
    """Add the checksums and element counts of a shard's slices to the tally of the shard's tensor
    in `tallies`."""
    for piece in shard.pieces():
        total = tally(tallies, piece.name, piece.shape, piece.values.dtype)
        total.add(int(piece.checksum()), piece.values.numel())


def verify(
    expected: Mapping[str, TensorRecord],
    tallies: Mapping[str, TensorTally],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Check by checksums and element counts that the slices of all ranks together are, bit for bit,
    all tensors of the manifest.

    Collective. The only communication is one all-reduce of two numbers for each tensor.

    Args:
        expected: Records of the tensors in the manifest.
        tallies: Checksums and element counts of this rank's slices; each element must be counted on
            one rank only.

    Raises:
        CorruptCheckpoint: On every rank, if a tensor differs.
    """
    rows = {name: row for row, name in enumerate(sorted(expected))}
    found_N2 = torch.zeros(len(rows), 2, dtype=torch.int64)
    for name, total in tallies.items():
        found_N2[rows[name], 0] = signed(total.checksum)
        found_N2[rows[name], 1] = total.elements
    dist.all_reduce(found_N2, group=group)
    compare(
        expected,
        {
            name: TensorTally(expected[name].dtype, expected[name].shape, *found_N2[row].tolist())
            for name, row in rows.items()
        },
    )

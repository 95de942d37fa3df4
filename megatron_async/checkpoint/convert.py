"""Hugging Face directories to distributed checkpoints and back, without building a model.

    hf_to_megatron("models/llama", "weights/llama", tensor=4, pipeline=2)
    megatron_to_hf("runs/my-run", "export/my-run")

The Megatron side is a checkpoint of this project: files per rank, finalized by a manifest. What a
run has saved can be converted at any moment; what was converted is a starting point of a run
(`model.checkpoint`). A converted checkpoint carries the Hugging Face config and tokenizer in `hf/`.

Progress is a bar of bytes or elements; silent where not wanted.

Invariants
- Streaming: in memory are the tensors of one parameter (Megatron), or of one output file (Hugging
  Face), never a model.
- The destination appears whole or not at all; what exists is never written over.
- Bit-exact: values are cut and joined, and cast only where `dtype` or config.json asks for it.
- Each parameter's checksum is written, and compared when it is read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeAlias

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from megatron_async.checkpoint.checksum import (
    TensorTally,
    check_tensor,
    checksum,
    compare,
    dtype_name,
    dtype_named,
    tally,
)
from megatron_async.checkpoint.files import PieceReader, RankFiles, header_room, piece_key
from megatron_async.checkpoint.manifest import (
    Checkpoint,
    CorruptCheckpoint,
    Manifest,
    SavedLayout,
    TensorRecord,
    finalize,
    find_latest,
    hash_file,
    open_checkpoint,
)
from megatron_async.checkpoint.placement import ParameterId, boxes, shards_of, stage_parameter_ids
from megatron_async.config.load import load_config
from megatron_async.config.model import ParallelConfig
from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture
from megatron_async.models.export import buckets
from megatron_async.models.families import read_architecture
from megatron_async.models.layout import check_layout
from megatron_async.models.model_files import SafetensorsDirectory, check_weights
from megatron_async.models.save import (
    DEFAULT_SHARD_BYTES,
    checkpoint_dtype,
    copy_hf_files,
    new_directory,
    write_model_directory,
)
from megatron_async.models.shards import merge, split
from megatron_async.run_directory import RunDirectory

HF_FOLDER = "hf"
CONVERTED = "weights_only"
PARAMETER_DTYPE = "parameter_dtype"  # of the model that a run's checkpoint is of
_OPEN_FILES = 1


# ---------------------------------------------------------------- to Megatron


def hf_to_megatron(
    source: Path | str,
    destination: Path | str,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    dtype: str | None = None,
    family: str = "",
    show_progress: bool = False,
) -> Checkpoint:
    """Weights of a Hugging Face directory as a checkpoint cut for `tensor` x `pipeline` ranks.

    It loads at every other layout too; at this one each rank reads a file of its own. `family`
    as `model.family`. Raises UserError for a missing or unfitting source, an impossible layout, an
    existing destination.
    """
    source, destination = Path(source), Path(destination)
    cast = None if dtype is None else dtype_named(dtype)
    architecture = read_architecture(source, family)
    _check_sizes(architecture, tensor, pipeline)
    _refuse_existing(destination)
    check_weights(source, architecture)
    with (
        SafetensorsDirectory(source, max_open=_OPEN_FILES) as directory,
        new_directory(destination) as folder,
    ):
        total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        with _progress("hf-to-megatron", total, show_progress) as advance:
            tensors = _write_pieces(
                architecture, directory, folder, tensor, pipeline, cast, advance
            )
        (folder / HF_FOLDER).mkdir()
        copy_hf_files(source, folder / HF_FOLDER)
        manifest = Manifest(
            lineage=0,
            step=0,
            layout=SavedLayout(tensor, pipeline, 1),
            files={
                str(path.relative_to(folder)): hash_file(path)
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            },
            tensors=tensors,
            trainer={CONVERTED: True},
            extra={"converted_from": str(source)},
        )
        return finalize(folder, destination, manifest)


def _check_sizes(architecture: Architecture, tensor: int, pipeline: int) -> None:
    parallel = ParallelConfig(
        ranks=tensor * pipeline, tensor=tensor, pipeline=pipeline, sequence=tensor > 1
    )
    check_layout(architecture, parallel)


def _write_pieces(
    a: Architecture,
    source: SafetensorsDirectory,
    folder: Path,
    tensor: int,
    pipeline: int,
    cast: torch.dtype | None,
    advance: "Advance",
) -> dict[str, TensorRecord]:
    """The files of every rank, parameter by parameter; returns what the manifest lists."""
    tallies: dict[str, TensorTally] = {}
    with ExitStack() as stack:
        for stage in range(pipeline):
            parameter_ids = list(stage_parameter_ids(a, stage, pipeline))
            ranks = [
                stack.enter_context(
                    RankFiles(
                        folder, stage * tensor + rank, _header_room(parameter_ids, tensor, rank)
                    )
                )
                for rank in range(tensor)
            ]
            for parameter_id in parameter_ids:
                for rank in range(shards_of(parameter_id.rule, tensor)):
                    names = parameter_id.tensor_names
                    size = shards_of(parameter_id.rule, tensor)
                    shard = split(parameter_id.rule, names, source.read, size, rank)
                    flat_N = (shard if cast is None else shard.to(cast)).reshape(-1)
                    known = tally(tallies, parameter_id.weights, parameter_id.shape, flat_N.dtype)
                    for box in boxes(parameter_id, tensor, rank):
                        piece = flat_N[box.begin : box.end].view(box.shape)
                        ranks[rank].add(piece_key(parameter_id.weights, box.offsets), piece)
                        known.add(
                            int(checksum(piece, box.offsets, parameter_id.shape)), piece.numel()
                        )
                    advance(shard.nbytes)
            for files in ranks:
                files.finish()
    return {name: known.record(name) for name, known in tallies.items()}


def _header_room(parameter_ids: Sequence[ParameterId], tensor: int, rank: int) -> int:
    return sum(
        header_room(piece_key(parameter_id.weights, box.offsets))
        for parameter_id in parameter_ids
        if rank < shards_of(parameter_id.rule, tensor)
        for box in boxes(parameter_id, tensor, rank)
    )


# ---------------------------------------------------------------- to Hugging Face


def megatron_to_hf(
    source: Path | str,
    destination: Path | str,
    *,
    model: Path | str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    family: str = "",
    show_progress: bool = False,
) -> Checkpoint:
    """The weights of a checkpoint as a Hugging Face directory; returns which checkpoint it was.

    `source` is a checkpoint directory, or a run directory (its newest intact checkpoint). `model`
    gives config and tokenizer; by default the model that the run or the conversion began with.
    Without `dtype` a run's weights have the precision of config.json, as at the end of a run, and
    converted weights keep theirs. `family` as `model.family`. Raises UserError.
    """
    destination = Path(destination)
    cast = None if dtype is None else dtype_named(dtype)
    checkpoint = _find_checkpoint(Path(source))
    hf_files = _hf_files_of(checkpoint, model)
    architecture = read_architecture(hf_files, family)
    _refuse_existing(destination)
    converted = checkpoint.manifest.trainer.get(CONVERTED)
    if cast is None and not converted:
        cast = checkpoint_dtype(architecture)
    parameter_ids = list(stage_parameter_ids(architecture, 0, 1))
    elements = sum(prod(parameter_id.shape) for parameter_id in parameter_ids)
    try:
        for parameter_id in parameter_ids:
            check_tensor(checkpoint.manifest.tensors, parameter_id.weights, parameter_id.shape)
        with (
            PieceReader(checkpoint.path, checkpoint.manifest.files) as reader,
            _progress("megatron-to-hf", elements, show_progress) as advance,
        ):
            stream = _hf_tensors(checkpoint, reader, architecture, cast, advance)
            version = "" if converted else str(checkpoint.manifest.version)
            files = buckets(stream, max_shard_bytes)
            write_model_directory(files, destination, hf_files, version, dtype)
    except CorruptCheckpoint as error:
        raise UserError(f"checkpoint {checkpoint.path}: {error}") from error
    return checkpoint


def _hf_tensors(
    checkpoint: Checkpoint,
    reader: PieceReader,
    a: Architecture,
    cast: torch.dtype | None,
    advance: "Advance",
) -> Iterator[tuple[str, Tensor]]:
    precision = checkpoint.manifest.trainer.get(PARAMETER_DTYPE)
    for parameter_id in stage_parameter_ids(a, 0, 1):
        whole = _read(checkpoint, reader, parameter_id)
        advance(whole.numel())
        if precision is not None:  # the model's values are roundings of the optimizer's
            whole = whole.to(dtype_named(precision))
        for name, tensor in zip(
            parameter_id.tensor_names, merge(parameter_id.rule, [whole]), strict=True
        ):
            # A clone: a view would keep the whole parameter in memory, and be saved with it.
            yield name, (tensor if cast is None else tensor.to(cast)).clone()


def _read(checkpoint: Checkpoint, reader: PieceReader, parameter_id: ParameterId) -> Tensor:
    """Read a whole parameter and compare its checksum. Raises CorruptCheckpoint."""
    record = checkpoint.manifest.tensors[parameter_id.weights]
    origin = (0,) * len(parameter_id.shape)
    whole = torch.empty(parameter_id.shape, dtype=dtype_named(record.dtype))
    reader.read(parameter_id.weights, origin, whole)
    found = TensorTally(dtype_name(whole.dtype), parameter_id.shape)
    found.add(int(checksum(whole, origin, parameter_id.shape)), whole.numel())
    compare({parameter_id.weights: record}, {parameter_id.weights: found})
    return whole


def _find_checkpoint(source: Path) -> Checkpoint:
    if not RunDirectory(source).config_file.exists():
        return open_checkpoint(source)
    checkpoints = RunDirectory(source).checkpoints
    newest = find_latest(checkpoints)
    if newest is None:
        raise UserError(f"run {source} has no intact checkpoint in {checkpoints}")
    return newest


def _hf_files_of(checkpoint: Checkpoint, model: Path | str | None) -> Path:
    """The directory with config.json and tokenizer that belongs to a checkpoint."""
    if model is not None:
        return Path(model)
    if (checkpoint.path / HF_FOLDER / "config.json").exists():
        return checkpoint.path / HF_FOLDER
    run_config = RunDirectory(checkpoint.path.parent.parent).config_file
    if not run_config.exists():
        raise UserError(
            f"checkpoint {checkpoint.path} does not name its model: it is not in a run "
            "directory; name its Hugging Face directory with --model"
        )
    return Path(load_config(run_config).model.path)


# ---------------------------------------------------------------- both

Advance: TypeAlias = Callable[[int], None]


@contextmanager
def _progress(title: str, total: int, show: bool) -> Iterator[Advance]:
    """A bar for the length of the block; gives what is called when so much more is done."""
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    title_column = TextColumn("{task.description}")
    with Progress(title_column, *columns, TimeRemainingColumn(), disable=not show) as bar:
        task = bar.add_task(title, total=total)
        yield partial(bar.advance, task)
        bar.update(task, completed=total)


def _refuse_existing(destination: Path) -> None:
    if destination.exists():
        raise UserError(f"--dst {destination} exists already")

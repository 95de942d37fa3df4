"""Converts Hugging Face directories to distributed checkpoints and back, without building a model.

    hf_to_megatron("models/llama", "weights/llama", tensor=4, pipeline=2)
    megatron_to_hf("runs/my-run", "export/my-run")

A distributed checkpoint is one of this project: files for each rank, and a manifest. A checkpoint
that a run has saved can be converted to a Hugging Face directory at any time, and a checkpoint that
was converted from one can be the starting point of a run (`model.checkpoint`). A converted
checkpoint contains the Hugging Face config and tokenizer in `hf/`.

A progress bar shows bytes or elements, unless the caller turns it off.

Invariants
- The whole model is never in memory. `hf_to_megatron` has the tensors of one parameter at a time in
  memory, and `megatron_to_hf` those of one output file.
- The destination appears completely or not at all; an existing destination is never overwritten.
- Values are only cut and joined, so they are equal bit for bit unless they are cast. They are cast
  to `dtype` if it is given. Weights that a run saved are first rounded to the precision of the
  trained model and, without `dtype`, then cast to the precision in config.json.
- `hf_to_megatron` stores a checksum of each parameter, and `megatron_to_hf` compares it.
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
from megatron_async.checkpoint.files import PieceReader, RankFiles, max_entry_bytes, piece_key
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
# Key in the manifest: precision of the parameters of the model that the run trained.
PARAMETER_DTYPE = "parameter_dtype"
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
    """Convert the weights of a Hugging Face directory to a checkpoint for `tensor` x `pipeline`
    ranks.

    The checkpoint can be loaded by any other number of ranks too. With this division, a rank reads
    the values of its shards from its own files; those of which several ranks have copies are only
    in the files of the first of them.

    Args:
        source: The Hugging Face directory.
        destination: The checkpoint directory to create.
        dtype: Precision of all tensors of the checkpoint; None keeps the precision of each tensor.
        family: Architecture family, with the values of the setting `model.family`; if empty, it is
            read from config.json.

    Raises:
        UserError: If the source is missing or does not fit its config.json, the layout is
            impossible for the model, or the destination exists.
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
    """Raise UserError if the model cannot be divided over `tensor` x `pipeline` ranks."""
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
    """Write the files of every rank, one parameter after the other; return the manifest's tensor
    records.

    Args:
        a: The architecture of the model.
        source: The Hugging Face tensors.
        folder: Where the files are written.
        cast: Precision to which all values are cast; None keeps the precision of each tensor.
        advance: Function that is called after each shard with the shard's number of bytes, to
            advance a progress bar.
    """
    tallies: dict[str, TensorTally] = {}
    with ExitStack() as stack:
        for stage in range(pipeline):
            parameter_ids = list(stage_parameter_ids(a, stage, pipeline))
            ranks = [
                stack.enter_context(
                    RankFiles(
                        folder, stage * tensor + rank, _header_bytes(parameter_ids, tensor, rank)
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
                    total = tally(tallies, parameter_id.weights, parameter_id.shape, flat_N.dtype)
                    for box in boxes(parameter_id, tensor, rank):
                        piece = flat_N[box.begin : box.end].view(box.shape)
                        ranks[rank].add(piece_key(parameter_id.weights, box.offsets), piece)
                        total.add(
                            int(checksum(piece, box.offsets, parameter_id.shape)), piece.numel()
                        )
                    advance(shard.nbytes)
            for files in ranks:
                files.finish()
    return {name: total.record(name) for name, total in tallies.items()}


def _header_bytes(parameter_ids: Sequence[ParameterId], tensor: int, rank: int) -> int:
    return sum(
        max_entry_bytes(piece_key(parameter_id.weights, box.offsets))
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
    """Write the weights of a checkpoint as a Hugging Face directory; return the checkpoint that was
    read.

    Args:
        source: A checkpoint directory, or a run directory, whose newest intact checkpoint is
            converted.
        destination: The Hugging Face directory to create.
        model: Directory whose config and tokenizer are copied. None means the Hugging Face files
            that a converted checkpoint contains, or else the model that the run started with.
        dtype: Precision of the written weights. For None it is the precision in config.json if a
            run saved the checkpoint (as in the export at the end of a run), and the stored
            precision if the checkpoint was converted from a Hugging Face directory.
        max_shard_bytes: Size limit of an output file.
        family: Architecture family, with the values of the setting `model.family`; if empty, it is
            read from config.json.

    Raises:
        UserError: If the checkpoint is missing, corrupt or of another model, or the destination
            exists.
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
    """Generate the name and values of each Hugging Face tensor, read from a checkpoint and
    verified.

    Args:
        cast: Precision of the returned tensors. For None it is the precision of the trained model
            if a run saved the checkpoint, and the stored precision if the checkpoint was converted
            from a Hugging Face directory.
        advance: Function that is called after each parameter with its number of elements, to
            advance a progress bar.
    """
    precision = checkpoint.manifest.trainer.get(PARAMETER_DTYPE)
    for parameter_id in stage_parameter_ids(a, 0, 1):
        whole = _read(checkpoint, reader, parameter_id)
        advance(whole.numel())
        # A checkpoint of a run has the optimizer's copy of the weights. The model's own weights are
        # that copy rounded to `precision`, so round it in the same way.
        if precision is not None:
            whole = whole.to(dtype_named(precision))
        for name, tensor in zip(
            parameter_id.tensor_names, merge(parameter_id.rule, [whole]), strict=True
        ):
            # Clone the tensor, because a view would keep the whole parameter in memory, and the
            # whole parameter would be saved.
            yield name, (tensor if cast is None else tensor.to(cast)).clone()


def _read(checkpoint: Checkpoint, reader: PieceReader, parameter_id: ParameterId) -> Tensor:
    """Read the values of a whole parameter from a checkpoint, and compare their checksum with the
    manifest's.

    Raises:
        CorruptCheckpoint: If the values are incomplete or differ from those that were saved.
    """
    record = checkpoint.manifest.tensors[parameter_id.weights]
    origin = (0,) * len(parameter_id.shape)
    whole = torch.empty(parameter_id.shape, dtype=dtype_named(record.dtype))
    reader.read(parameter_id.weights, origin, whole)
    found = TensorTally(dtype_name(whole.dtype), parameter_id.shape)
    found.add(int(checksum(whole, origin, parameter_id.shape)), whole.numel())
    compare({parameter_id.weights: record}, {parameter_id.weights: found})
    return whole


def _find_checkpoint(source: Path) -> Checkpoint:
    """Return the checkpoint in the directory `source`, or the newest intact checkpoint of the run
    if `source` is a run directory.

    Raises:
        UserError: If no intact checkpoint is found.
    """
    if not RunDirectory(source).config_file.exists():
        return open_checkpoint(source)
    checkpoints = RunDirectory(source).checkpoints
    newest = find_latest(checkpoints)
    if newest is None:
        raise UserError(f"run {source} has no intact checkpoint in {checkpoints}")
    return newest


def _hf_files_of(checkpoint: Checkpoint, model: Path | str | None) -> Path:
    """Return the directory with the config.json and tokenizer that belong to a checkpoint.

    Args:
        model: The directory that the user named. None means the directory in the checkpoint if it
            was converted, or else the model that the run started with.

    Raises:
        UserError: If `model` is None, and the checkpoint was not converted and is not in a run
            directory.
    """
    if model is not None:
        return Path(model)
    if (checkpoint.path / HF_FOLDER / "config.json").exists():
        return checkpoint.path / HF_FOLDER
    run_config = RunDirectory(checkpoint.path.parent.parent).config_file
    if not run_config.exists():
        raise UserError(
            f"checkpoint {checkpoint.path} does not name its model, since it is not in a run "
            "directory. Name the model's Hugging Face directory with --model"
        )
    return Path(load_config(run_config).model.path)


# ---------------------------------------------------------------- both

Advance: TypeAlias = Callable[[int], None]


@contextmanager
def _progress(title: str, total: int, show: bool) -> Iterator[Advance]:
    """Show a progress bar during this block. The value of the context is a function that advances
    the bar by a given amount.

    Args:
        total: The amount at which the bar is full.
        show: Whether the bar is shown at all.
    """
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    title_column = TextColumn("{task.description}")
    with Progress(title_column, *columns, TimeRemainingColumn(), disable=not show) as bar:
        task = bar.add_task(title, total=total)
        yield partial(bar.advance, task)
        bar.update(task, completed=total)


def _refuse_existing(destination: Path) -> None:
    """Raise UserError if the destination of a conversion exists."""
    if destination.exists():
        raise UserError(f"--dst {destination} exists already. Name a new directory")

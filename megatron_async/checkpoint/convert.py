"""Hugging Face directories to distributed checkpoints and back, without building a model.

    hf_to_megatron("models/llama", "weights/llama", tensor=4, pipeline=2)
    megatron_to_hf("runs/my-run", "export/my-run")

The Megatron side is a checkpoint of this project: files per rank, finalised by a manifest. What a
run has saved can be converted at any moment; what was converted is a starting point of a run
(`model.checkpoint`). A converted checkpoint carries the Hugging Face config and tokenizer in `hf/`.

Invariants
- Streaming: in memory are the tensors of one parameter (Megatron), or of one output file (Hugging
  Face), never a model.
- The destination appears whole or not at all; what exists is never written over.
- Bit-exact: values are cut and joined, and cast only where `dtype` or config.json says so.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from megatron_async.checkpoint.files import ShardFiles, ShardReader
from megatron_async.checkpoint.manifest import (
    Checkpoint,
    CorruptCheckpoint,
    Layout,
    Manifest,
    finalise,
    find_latest,
    hash_file,
    open_checkpoint,
)
from megatron_async.checkpoint.placement import (
    Slot,
    checkpoint_key,
    leading_offset,
    leading_shape,
    parameter_shape,
    pieces,
    shards_of,
    stage_slots,
)
from megatron_async.checkpoint.progress import ByteProgress
from megatron_async.config.load import load_config
from megatron_async.config.model import ParallelConfig
from megatron_async.errors import UserError
from megatron_async.trainer.layout import check_layout
from megatron_async.weights.architecture import Architecture
from megatron_async.weights.export import buckets
from megatron_async.weights.families import read_architecture
from megatron_async.weights.load import INDEX_FILE, SafetensorsDirectory, check_tensors
from megatron_async.weights.save import (
    COPIED_SUFFIXES,
    DEFAULT_SHARD_BYTES,
    checkpoint_dtype,
    write_model_directory,
)
from megatron_async.weights.shards import Layout as ShardLayout
from megatron_async.weights.shards import merge, split

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HF_FOLDER = "hf"
CONVERTED = "weights_only"
_OPEN_FILES = 1


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Raises UserError for a name that is not one of `DTYPES`."""
    if name is not None and name not in DTYPES:
        raise UserError(f"--dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]


# ---------------------------------------------------------------- to Megatron


def hf_to_megatron(
    source: Path | str,
    destination: Path | str,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    dtype: str | None = None,
    show_progress: bool = False,
) -> Checkpoint:
    """Weights of a Hugging Face directory as a checkpoint cut for `tensor` x `pipeline` ranks.

    It loads at every other layout too; at this one each rank reads a file of its own. Raises
    UserError for a missing or unfitting source, an impossible layout, an existing destination.
    """
    source, destination, cast = Path(source), Path(destination), parse_dtype(dtype)
    architecture = read_architecture(source)
    _check_sizes(architecture, tensor, pipeline)
    _refuse_existing(destination)
    with SafetensorsDirectory(source, max_open=_OPEN_FILES) as directory:
        check_tensors(directory, architecture)
        with _partial(destination) as partial:
            files = ShardFiles(partial, tensor * pipeline)
            total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
            with files, ByteProgress("hf-to-megatron", total, show_progress) as progress:
                for stage in range(pipeline):
                    for slot in stage_slots(architecture, stage, pipeline):
                        size = shards_of(slot, tensor)
                        key = checkpoint_key(slot.rule)
                        shape = _global_shape(architecture, slot, tensor)
                        for rank in range(size):
                            shard = split(slot.rule, slot.tensor_names, directory.read, size, rank)
                            shard = shard if cast is None else shard.to(cast)
                            for piece in pieces(slot, shard, rank, size):
                                files.add(stage * tensor + rank, key, shape, piece)
                            progress.advance(shard.nbytes)
                files.finish()
            _copy_hf_files(source, partial / HF_FOLDER)
            _write_common(partial)
            manifest = Manifest(
                lineage=0,
                step=0,
                layout=Layout(tensor, pipeline, 1),
                files={
                    str(path.relative_to(partial)): hash_file(path)
                    for path in sorted(partial.rglob("*"))
                    if path.is_file()
                },
                trainer={CONVERTED: True},
                extra={"converted_from": str(source)},
                written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            return finalise(partial, destination, manifest)


def _check_sizes(architecture: Architecture, tensor: int, pipeline: int) -> None:
    for name, size in (("--tp", tensor), ("--pp", pipeline)):
        if size < 1:
            raise UserError(f"{name} is {size}; it must be 1 or more")
    parallel = ParallelConfig(
        ranks=tensor * pipeline, tensor=tensor, pipeline=pipeline, sequence=tensor > 1
    )
    check_layout(architecture, parallel)


def _global_shape(a: Architecture, slot: Slot, tensor: int) -> tuple[int, ...]:
    return (*leading_shape(a, slot.rule), *parameter_shape(a, slot.rule, tensor))


def _write_common(folder: Path) -> None:
    """What Megatron's loader wants beside the tensors: no other state, and the format's name."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    torch.save({}, folder / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


# ---------------------------------------------------------------- to Hugging Face


def megatron_to_hf(
    source: Path | str,
    destination: Path | str,
    *,
    model: Path | str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    show_progress: bool = False,
) -> Checkpoint:
    """The weights of a checkpoint as a Hugging Face directory; returns which checkpoint it was.

    `source` is a checkpoint directory, or a run directory (its newest intact checkpoint). `model`
    gives config and tokenizer; by default the model that the run or the conversion began with.
    Without `dtype` a run's weights have the precision of config.json, as at the end of a run, and
    converted weights keep theirs. Raises UserError.
    """
    destination, cast = Path(destination), parse_dtype(dtype)
    checkpoint = _find_checkpoint(Path(source))
    hf_files = _hf_files_of(checkpoint, model)
    architecture = read_architecture(hf_files)
    _refuse_existing(destination)
    if cast is None and not checkpoint.manifest.trainer.get(CONVERTED):
        cast = checkpoint_dtype(architecture)
    try:
        reader = ShardReader(checkpoint.path)
        _check_keys(reader, architecture, checkpoint.path)
        with (
            _with_dtype(hf_files, dtype) as copied_from,
            ByteProgress(
                "megatron-to-hf", _parameter_count(reader, architecture), show_progress
            ) as progress,
        ):
            stream = _hf_tensors(reader, architecture, cast, progress)
            write_model_directory(buckets(stream, max_shard_bytes), destination, copied_from)
    except CorruptCheckpoint as error:
        raise UserError(f"checkpoint {checkpoint.path}: {error}") from error
    return checkpoint


def _hf_tensors(
    reader: ShardReader, a: Architecture, cast: torch.dtype | None, progress: ByteProgress
) -> Iterator[tuple[str, Tensor]]:
    for slot in stage_slots(a, 0, 1):
        whole = reader.read(checkpoint_key(slot.rule), leading_offset(slot))
        progress.advance(whole.numel())
        for name, tensor in zip(slot.tensor_names, merge(slot.rule, [whole]), strict=True):
            # A clone: a view would keep the whole parameter in memory, and be saved with it.
            yield name, (tensor if cast is None else tensor.to(cast)).clone()


def _check_keys(reader: ShardReader, a: Architecture, path: Path) -> None:
    """Every parameter is there with the model's shape; a padded vocabulary may be any longer."""
    for slot in stage_slots(a, 0, 1):
        key, want = checkpoint_key(slot.rule), _global_shape(a, slot, 1)
        if key not in reader:
            raise UserError(f"checkpoint {path} has no tensor {key}; the model's config.json has")
        shape = reader.shape(key)
        fits = shape == want
        if slot.rule.layout is ShardLayout.VOCAB:
            fits = shape[1:] == want[1:] and shape[0] >= want[0]
        if not fits:
            raise UserError(
                f"checkpoint {path}: tensor {key} has shape {shape}, config.json asks for {want}"
            )


def _parameter_count(reader: ShardReader, a: Architecture) -> int:
    total = 0
    for key in {checkpoint_key(slot.rule) for slot in stage_slots(a, 0, 1)}:
        total += torch.Size(reader.shape(key)).numel()
    return total


def _find_checkpoint(source: Path) -> Checkpoint:
    if not (source / "config.yaml").exists():
        return open_checkpoint(source)
    newest = find_latest(source / "checkpoints")
    if newest is None:
        raise UserError(f"run {source} has no intact checkpoint in {source / 'checkpoints'}")
    return newest


def _hf_files_of(checkpoint: Checkpoint, model: Path | str | None) -> Path:
    """The directory with config.json and tokenizer that belongs to a checkpoint."""
    if model is not None:
        return Path(model)
    if (checkpoint.path / HF_FOLDER / "config.json").exists():
        return checkpoint.path / HF_FOLDER
    run_config = checkpoint.path.parent.parent / "config.yaml"
    if not run_config.exists():
        raise UserError(
            f"checkpoint {checkpoint.path} does not say which model it is of: it is not in a run "
            "directory; name its Hugging Face directory with --model"
        )
    return Path(load_config(run_config).model.path)


@contextmanager
def _with_dtype(hf_files: Path, dtype: str | None) -> Iterator[Path]:
    """`hf_files`, or a copy of its small files whose config.json states `dtype`."""
    if dtype is None:
        yield hf_files
        return
    with tempfile.TemporaryDirectory(prefix="megatron-async-convert-") as name:
        folder = Path(name)
        _copy_hf_files(hf_files, folder / HF_FOLDER)
        config_file = folder / HF_FOLDER / "config.json"
        config = json.loads(config_file.read_text())
        config.pop("torch_dtype", None)
        config_file.write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
        yield folder / HF_FOLDER


# ---------------------------------------------------------------- both


def _copy_hf_files(source: Path, folder: Path) -> None:
    folder.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and path.name != INDEX_FILE:
            shutil.copyfile(path, folder / path.name)


def _refuse_existing(destination: Path) -> None:
    if destination.exists():
        raise UserError(f"--dst {destination} exists already")


@contextmanager
def _partial(destination: Path) -> Iterator[Path]:
    """A directory beside the destination, gone when it was not renamed."""
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--dst {destination} cannot be made: {error.strerror}") from error
    try:
        yield partial
    finally:
        if partial.exists():
            shutil.rmtree(partial)

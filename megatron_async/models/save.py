"""Writes a Hugging Face model directory from the running model, one file after the other. The
directory appears only when it is complete.

Invariants
- The directory appears completely or not at all: everything is written and synced in a temporary
  directory next to it, which is then renamed.
- In addition to its own shards, rank 0 has at most the tensors of one file in memory:
  `max_shard_bytes` bytes, or one larger tensor.
- Weights are written in the precision that config.json states. So loading a Hugging Face directory
  into Megatron and saving it gives the same weights, bit for bit.
- Every file of weights that a run writes contains their policy version.
- Config, tokenizer and chat templates are copied from the directory from which the model came.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_async.config.files import named_templates
from megatron_async.errors import UserError
from megatron_async.files.disk import force_to_disk, with_default_mode, writing
from megatron_async.models.architecture import Architecture
from megatron_async.models.export import SENDER, NamedTensor, buckets, sender_tensors
from megatron_async.models.model_files import INDEX_FILE, SINGLE_FILE, VERSION_KEY
from megatron_async.models.parameters import unwrap

DEFAULT_SHARD_BYTES = 5 * 10**9
COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


def save_hf(
    chunks: Sequence[torch.nn.Module],
    destination: Path | str,
    source: Path | str,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    version: str = "",
) -> None:
    """Write the model as Hugging Face directory `destination`. Every rank must make this call; rank
    0 writes.

    Args:
        chunks: The parts of the model that this rank has.
        destination: The directory to create.
        source: The Hugging Face directory whose config and tokenizer files are copied.
        max_shard_bytes: Largest size of a file in bytes, unless a single tensor is larger.
        version: Policy version of the weights; empty if no run has trained them.

    Raises:
        UserError: On every rank, before anything is written, if `destination` exists.
        CannotWrite: On rank 0, if the disk fails.
    """
    architecture: Architecture = unwrap(chunks[0]).architecture
    destination = Path(destination)
    # Only rank 0 checks, so that all ranks come to the same decision even if a shared file system
    # shows them different states.
    exists = [destination.exists()]
    dist.broadcast_object_list(exists, src=SENDER)
    if exists[0]:
        raise UserError(f"export directory {destination} already exists")
    dtype = checkpoint_dtype(architecture)
    stream = buckets(sender_tensors(chunks, architecture, dtype), max_shard_bytes)
    if dist.get_rank() == SENDER:
        write_model_directory(stream, destination, Path(source), version)
    else:
        for _ in stream:
            pass
    dist.barrier()


def checkpoint_dtype(architecture: Architecture) -> torch.dtype:
    """Return the torch dtype that config.json states for the weights."""
    dtype = getattr(torch, architecture.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def write_model_directory(
    stream: Iterator[list[NamedTensor]],
    destination: Path,
    source: Path,
    version: str = "",
    dtype: str | None = None,
) -> None:
    """Write each bucket of `stream` as one safetensors file of the new directory `destination`.

    Args:
        stream: Buckets of named tensors.
        destination: The directory to create.
        source: The Hugging Face directory whose config and tokenizer files are copied.
        version: Policy version of the weights; empty if no run has trained them.
        dtype: Precision that is written into the copied config.json; None leaves config.json
            unchanged.
    """
    with new_directory(destination) as partial:
        _write_weights(stream, partial, version)
        copy_hf_files(source, partial, dtype)
        for path in partial.rglob("*"):
            force_to_disk(path)
        force_to_disk(partial)
        partial.rename(destination)
        force_to_disk(destination.parent)


@contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Create a temporary directory next to `destination` and yield its path.

    The caller's `with` block writes files into the directory, and must rename it to `destination`
    when all files are written. If the block ends without renaming it, the directory is removed.

    Raises:
        CannotWrite: If the disk fails in the block.
    """
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    with writing(destination):
        partial.mkdir(parents=True)
        try:
            yield partial
        finally:
            if partial.exists():
                shutil.rmtree(partial)


def copy_hf_files(source: Path, folder: Path, dtype: str | None = None) -> None:
    """Copy the files of a model directory other than the weights, such as config and tokenizer.

    Args:
        source: The model directory.
        folder: Directory to which the copies are written.
        dtype: Precision that is written into the copied config.json; None leaves config.json
            unchanged.
    """
    for path in [*sorted(source.iterdir()), *named_templates(source)]:
        if path.is_file() and path.suffix in COPIED_SUFFIXES and path.name != INDEX_FILE:
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    if dtype is not None:
        file = folder / "config.json"
        config = {**json.loads(file.read_text()), "dtype": dtype}
        config.pop("torch_dtype", None)
        file.write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(stream: Iterator[list[NamedTensor]], folder: Path, version: str) -> None:
    """Write each bucket of tensors to a safetensors file in `folder`; if there are several files,
    write an index too."""
    metadata = {"format": "pt", VERSION_KEY: version}
    names_of_file: list[list[str]] = []
    total = 0
    for bucket in stream:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
        names_of_file.append(list(tensors))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        path = folder / _numbered(len(names_of_file), 0)
        with writing(path), with_default_mode(path):
            save_file(tensors, path, metadata=metadata)
        # Release these tensors before the tensors of the next bucket are made.
        bucket.clear()
        tensors.clear()
    count = len(names_of_file)
    if count == 1:
        (folder / _numbered(1, 0)).rename(folder / SINGLE_FILE)
        return
    weight_map = {}
    for number, names in enumerate(names_of_file, start=1):
        final = _numbered(number, count)
        (folder / _numbered(number, 0)).rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with writing(folder / INDEX_FILE):
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _numbered(number: int, count: int) -> str:
    """Return the name of the file of weights with this number, if there are `count` files."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"

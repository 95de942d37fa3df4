"""A Hugging Face model directory written from the running model, atomically and in a stream.

Invariants
- The directory appears whole or not at all: everything is written and synced beside it first,
  then renamed.
- Rank 0 holds at most one file's worth of tensors (`max_shard_bytes`, or one larger tensor).
- Weights have the precision that config.json states, so that HF → Megatron → HF is bit-exact.
- Every file of weights names the policy version that they are, where they are of a run.
- Config, tokenizer and chat templates are copied from the directory that the model came from.
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
    """Write the model to `destination`; called on every rank, rank 0 writes.

    `source` is the Hugging Face directory that gives config and tokenizer files, `version` what the
    weights are in their run. Raises UserError
    (on every rank, before anything is written) when `destination` exists.
    """
    architecture: Architecture = unwrap(chunks[0]).architecture
    destination = Path(destination)
    # One rank looks, so that all ranks decide alike on a shared file system.
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
    """The precision that config.json states."""
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
    """Each bucket of `stream` becomes one safetensors file of a new directory `destination`.

    Config and tokenizer are those of `source`, but for a `dtype`.
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
    """A directory beside the destination, gone when it was not renamed. Raises CannotWrite."""
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    with writing(destination):
        partial.mkdir(parents=True)
        try:
            yield partial
        finally:
            if partial.exists():
                shutil.rmtree(partial)


def copy_hf_files(source: Path, folder: Path, dtype: str | None = None) -> None:
    """Copy what lies beside the weights; `dtype` is what config.json of the copy states."""
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
        # While the next bucket fills, nothing of this one may be left.
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
    return f"model-{number:05d}-of-{count:05d}.safetensors"

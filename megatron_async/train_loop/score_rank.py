"""Entry point of one rank of `megatron-async score`, which torchrun starts.

The command is `-m megatron_async.train_loop.score_rank RUN_DIR ROWS OUT`. The rank reads rows of
`input_ids` and `loss_mask` from the file ROWS, and writes the log-probs of all tokens whose mask is
1 to the file OUT. The trainer's model computes them, in the parallel layout of the settings,
without optimizer and gradients.

Invariants
- Every rank reads the same rows in the same order. Rank 0 writes the output file, completely or not
  at all.
- The array `logprobs` has one value for each token. It is 0 where the mask is 0, and for the first
  token of each row, whose log-prob is not defined because no token precedes it.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from megatron_async.config import RunConfig
from megatron_async.errors import UserError, short_repr
from megatron_async.files.disk import replacing, with_default_mode, writing
from megatron_async.run_directory import RunDirectory
from megatron_async.tasks.base import WorkedExample
from megatron_async.tasks.rows import open_rows
from megatron_async.train_loop.attempt import exit_code, leave
from megatron_async.train_loop.sft_rank import example_batch

_MICROBATCHES = 4
"""Number of microbatches for each pipeline stage that a data-parallel rank computes in one pass of
the pipeline. With several, all stages are busy for most of the time."""


def read_sequences(path: Path | str, vocabulary: int) -> Iterator[WorkedExample]:
    """Yield the token sequence of each row in the file at `path`.

    Args:
        path: A JSON Lines or Parquet file with the columns `input_ids` and `loss_mask`.
        vocabulary: Number of tokens that the model knows.

    Raises:
        UserError: A row is not valid; the message names its file and line.
    """
    rows = open_rows(str(path), "", "--data")
    for number, row in enumerate(rows):
        if isinstance(row, UserError):
            raise row
        yield _sequence(row, rows.where(number), vocabulary)


def _sequence(row: dict[str, Any], where: str, vocabulary: int) -> WorkedExample:
    """Check one row and return its tokens as a `WorkedExample` without a prompt, so that all tokens
    count as response. `where` names the row in error messages."""
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    ids_L, mask_L = _vector(ids), _vector(mask)
    if ids_L.dtype.kind != "i":
        raise UserError(f"{where}: input_ids is {short_repr(ids)}; it must be a list of integers")
    for position in np.flatnonzero((ids_L < 0) | (ids_L >= vocabulary)):
        raise UserError(
            f"{where}: input_ids has {ids_L[position]} at position {position}; the model's token "
            f"IDs are 0 to {vocabulary - 1}"
        )
    if len(mask_L) != len(ids_L) or not np.isin(mask_L, (0, 1)).all():
        raise UserError(
            f"{where}: loss_mask is {short_repr(mask)}; it must be a list of {len(ids_L)} numbers, "
            "one for each of input_ids, each 0 or 1"
        )
    scored_L = mask_L.astype(np.bool_)
    scored_L[0] = False
    return WorkedExample(np.zeros(0, np.int32), ids_L.astype(np.int32), scored_L)


def _vector(values: object) -> np.ndarray[Any, Any]:
    """Return a list of numbers as an array of one dimension. For any other value, return an empty
    array of strings, which the caller refuses."""
    try:
        array = np.array(values)
    except ValueError:  # `values` has nested lists of different lengths.
        array = np.array(None)
    numbers = array.ndim == 1 and len(array) and array.dtype.kind in "bif"
    return array if numbers else np.zeros(0, np.str_)


def score(config: RunConfig, rows: Path | str, out: Path) -> None:
    """Compute the log-probs of the tokens of all rows at `sampling.temperature`, and write them to
    the file `out`.

    All ranks must call this together. Each rank computes its share, as the parallel layout divides
    sequences and layers; rank 0 writes the file.
    """
    from megatron_async.trainer.device import import_megatron

    import_megatron()
    from megatron_async.algorithms.device_batch import DeviceBatch, to_host
    from megatron_async.trainer.forward import PolicyRunner
    from megatron_async.trainer.parallel import parallel_session
    from megatron_async.trainer.step import load_policy

    with parallel_session(config.parallel, config.trainer, config.seed) as layout:
        [model] = load_policy(config)
        runner = PolicyRunner(
            model,
            layout,
            token_budget=config.trainer.microbatch_tokens,
            hidden_size=model.architecture.hidden_size,
        )
        sequences = read_sequences(rows, model.architecture.vocab_size)
        parallel = config.parallel
        min_tokens = (
            _MICROBATCHES * parallel.data * parallel.pipeline * config.trainer.microbatch_tokens
        )
        found, lengths = [], []
        for chunk in _chunks(sequences, min_tokens):
            batch = replace(example_batch(chunk, 0), temperature=config.sampling.temperature)
            found.append(to_host(runner.logprobs(DeviceBatch.of(batch, layout.device))))
            lengths.append(batch.lengths_S())
        if layout.rank == 0:
            cu_S1 = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
            arrays = {"logprobs": np.concatenate(found), "cu_seqlens": cu_S1}
            with writing(out), replacing(out) as temporary, with_default_mode(temporary):
                save_file(arrays, temporary)


def _chunks(sequences: Iterator[WorkedExample], min_tokens: int) -> Iterator[list[WorkedExample]]:
    """Group consecutive sequences into lists with at least `min_tokens` response tokens each. The
    last list may have fewer."""
    chunk: list[WorkedExample] = []
    tokens = 0
    for sequence in sequences:
        chunk.append(sequence)
        tokens += len(sequence.response_ids)
        if tokens >= min_tokens:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


def main(arguments: list[str]) -> int:
    """Run one rank of `score` and return its exit code: 0, 1 if a component failed, 2 for bad
    input."""
    directory, config = RunDirectory.find(arguments[0], [])
    return exit_code(directory, lambda: score(config, arguments[1], Path(arguments[2])))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

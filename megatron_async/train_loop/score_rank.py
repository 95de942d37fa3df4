"""Entry of one rank of `megatron-async score` under torchrun: `-m ... RUN_DIR ROWS OUT`.

Rows of `input_ids` and `loss_mask` in, log-probs of the tokens with mask 1 out: those that the
trainer computes, from the same model at the same layout, without optimizer or gradients.

Invariants
- Every rank reads the same rows in the same order; rank 0 writes, all of the file or nothing.
- `logprobs` has a value for each token, 0 where none was asked for and at each first token, which
  nothing precedes.
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
"""For each rank at once: enough to keep all pipeline stages busy."""


def read_sequences(path: Path | str, vocabulary: int) -> Iterator[WorkedExample]:
    """The sequence of each row. Raises UserError that names a bad row by file and line."""
    rows = open_rows(str(path), "", "--data")
    for number, row in enumerate(rows):
        if isinstance(row, UserError):
            raise row
        yield _sequence(row, rows.where(number), vocabulary)


def _sequence(row: dict[str, Any], where: str, vocabulary: int) -> WorkedExample:
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    ids_L, mask_L = _vector(ids), _vector(mask)
    if ids_L.dtype.kind != "i":
        raise UserError(
            f"{where}: input_ids is {short_repr(ids)}; it must be a list of whole numbers"
        )
    for place in np.flatnonzero((ids_L < 0) | (ids_L >= vocabulary)):
        raise UserError(
            f"{where}: input_ids has {ids_L[place]} at place {place}; the model has the tokens 0 "
            f"to {vocabulary - 1}"
        )
    if len(mask_L) != len(ids_L) or not np.isin(mask_L, (0, 1)).all():
        raise UserError(
            f"{where}: loss_mask is {short_repr(mask)}; it must be a list of {len(ids_L)} numbers, "
            "as many as input_ids, each 0 or 1"
        )
    scored_L = mask_L.astype(np.bool_)
    scored_L[0] = False
    return WorkedExample(np.zeros(0, np.int32), ids_L.astype(np.int32), scored_L)


def _vector(values: object) -> np.ndarray[Any, Any]:
    """A list of numbers as an array; anything else as an empty one of no number."""
    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths
        array = np.array(None)
    numbers = array.ndim == 1 and len(array) and array.dtype.kind in "bif"
    return array if numbers else np.zeros(0, np.str_)


def score(config: RunConfig, rows: Path | str, out: Path) -> None:
    """Run a rank: the log-probs of all rows, at `sampling.temperature`, to `out`."""
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
        wanted = (
            _MICROBATCHES * parallel.data * parallel.pipeline * config.trainer.microbatch_tokens
        )
        found, lengths = [], []
        for part in _parts(sequences, wanted):
            batch = replace(example_batch(part, 0), temperature=config.sampling.temperature)
            found.append(to_host(runner.logprobs(DeviceBatch.of(batch, layout.device))))
            lengths.append(batch.lengths_S())
        if layout.rank == 0:
            cu_S1 = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
            arrays = {"logprobs": np.concatenate(found), "cu_seqlens": cu_S1}
            with writing(out), replacing(out) as temporary, with_default_mode(temporary):
                save_file(arrays, temporary)


def _parts(sequences: Iterator[WorkedExample], wanted: int) -> Iterator[list[WorkedExample]]:
    """Neighbors of at least `wanted` tokens together; the last part may have fewer."""
    part: list[WorkedExample] = []
    tokens = 0
    for sequence in sequences:
        part.append(sequence)
        tokens += len(sequence.response_ids)
        if tokens >= wanted:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def main(arguments: list[str]) -> int:
    """Exit code of one rank (`train_loop/attempt.py`)."""
    directory, config = RunDirectory.find(arguments[0], [])
    return exit_code(directory, lambda: score(config, arguments[1], Path(arguments[2])))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

"""Provides the Triton backend of `token_logprob`: block plans, kernel launches, and the two matrix
products that compute the gradients of hidden states and weight from dLoss/dlogits.

Invariants
- All temporaries together stay within `workspace_bytes`. If only some tokens take part, one is a
  copy of the hidden states of a block. The forward pass also needs the partial statistics, and the
  backward pass a float32 gradient of the block's hidden states and one block of dLoss/dlogits.
- No atomic operations are used here. With `deterministic` the two products are computed by
  `accumulate_product_kernel`, whose order of summation is fixed; otherwise by the GPU vendor's
  library, if it can add to a matrix of the result's dtype.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_async_kernels.head_types import HeadCotangents, HeadGrads, HeadProblem, HeadStats
from megatron_async_kernels.triton_backward import accumulate_product_kernel, dlogits_kernel
from megatron_async_kernels.triton_forward import combine_kernel, head_stats_kernel
from megatron_async_kernels.triton_tiles import (
    INTERPRETER,
    HeadConfigs,
    TileConfig,
    TileSpec,
    head_configs,
    without_descriptors,
)

COMBINE_BLOCK = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter, because TRITON_INTERPRET was set when
    they were defined."""
    return isinstance(head_stats_kernel, InterpretedFunction)


@dataclass(frozen=True, eq=False)
class PartialStats:
    """Softmax statistics of each split (part) of the vocabulary, [splits, R], which must be
    combined. The targets' logits, `target_R` [R], need not be combined."""

    max_PR: Tensor
    sum_PR: Tensor
    weighted_PR: Tensor
    target_R: Tensor

    @property
    def splits(self) -> int:
        """Number of splits of the vocabulary."""
        return int(self.max_PR.shape[0])


@dataclass(frozen=True)
class BackwardPlan:
    """Number of rows and of vocabulary columns of one block of dLoss/dlogits."""

    rows: int
    columns: int


def plan_backward(problem: HeadProblem) -> BackwardPlan:
    """Choose the size of a block of dLoss/dlogits whose temporaries fit into `workspace_bytes`, so
    that the fewest bytes are read and written.

    The float32 gradient of the hidden states is read and written once for each block of columns,
    and that of the weight once for each block of rows. These are 8 * D * (R * column blocks + V *
    row blocks) bytes in addition to the factors of the products.

    Raises:
        ValueError: Not even one row and one column fit into `workspace_bytes`.
    """
    element = problem.hidden_TD.element_size()
    hidden_size, vocab = int(problem.weight_VD.shape[1]), int(problem.weight_VD.shape[0])
    compacted = problem.rows_R is not None
    per_row = hidden_size * ((4 if element < 4 else 0) + (element if compacted else 0))
    candidates = {1, 16, problem.num_rows}
    for parts in range(1, 257):
        rows = -(-problem.num_rows // parts)
        candidates.add(rows + -rows % 128)
    best: tuple[int, BackwardPlan] | None = None
    for rows in sorted(candidates):
        if rows > problem.num_rows:
            continue
        columns = min(vocab, (problem.workspace_bytes - rows * per_row) // (rows * element))
        if columns < 1:
            continue
        if columns >= 256:
            columns -= columns % 256 if columns < vocab else 0
        column_blocks = -(-vocab // columns)
        cost = vocab * -(-problem.num_rows // rows) + problem.num_rows * column_blocks
        if best is None or cost < best[0]:
            best = (cost, BackwardPlan(rows, columns))
    if best is None:
        raise ValueError(
            f"workspace_bytes={problem.workspace_bytes} is too small for hidden size {hidden_size}"
        )
    return best[1]


class TritonKernels:
    """Backend of `token_logprob` for CUDA devices. If TRITON_INTERPRET=1 is set, it also works on
    CPU tensors, in Triton's interpreter."""

    def stats(self, problem: HeadProblem, *, want_entropy: bool) -> HeadStats:
        """Compute the softmax statistics of one vocabulary shard: first of each split (part) of the
        vocabulary, and then combine them."""
        partial = partial_stats(problem, want_entropy=want_entropy)
        if partial.splits == 1:
            weighted_R = partial.weighted_PR[0] if want_entropy else None
            return HeadStats(partial.max_PR[0], partial.sum_PR[0], partial.target_R, weighted_R)
        max_R, sum_R = torch.empty_like(partial.max_PR[0]), torch.empty_like(partial.max_PR[0])
        weighted_R = torch.empty_like(max_R) if want_entropy else None
        with on_device(problem.hidden_TD):
            combine_kernel[(triton.cdiv(problem.num_rows, COMBINE_BLOCK),)](
                partial.max_PR,
                partial.sum_PR,
                partial.weighted_PR,
                max_R,
                sum_R,
                max_R if weighted_R is None else weighted_R,
                problem.num_rows,
                partial.splits,
                BLOCK=COMBINE_BLOCK,
                ENTROPY=want_entropy,
                num_warps=4,
            )
        return HeadStats(max_R, sum_R, partial.target_R, weighted_R)

    def grads(self, problem: HeadProblem, cotangents: HeadCotangents, grads: HeadGrads) -> None:
        """Compute the gradients of hidden states and weight for one vocabulary shard into `grads`,
        block by block."""
        _check(problem)
        if problem.num_rows == 0 or problem.weight_VD.shape[0] == 0:
            return
        plan = plan_backward(problem)
        dtype, device = problem.hidden_TD.dtype, problem.hidden_TD.device
        dlogits_CB = torch.empty((plan.rows, plan.columns), dtype=dtype, device=device)
        columns_total = int(problem.weight_VD.shape[0])
        with on_device(problem.hidden_TD):
            for row in range(0, problem.num_rows, plan.rows):
                stop = min(row + plan.rows, problem.num_rows)
                hidden_CD = problem.hidden_block(row, stop).contiguous()
                dhidden_CD = _dhidden_block(problem, grads, hidden_CD, row, stop)
                for column in range(0, columns_total, plan.columns):
                    end = min(column + plan.columns, columns_total)
                    block_CB = dlogits_CB[: stop - row, : end - column]
                    launch_dlogits(
                        problem, cotangents, hidden_CD, block_CB, (row, stop), (column, end)
                    )
                    _add_products(problem, grads, hidden_CD, dhidden_CD, block_CB, (column, end))
                _write_dhidden(problem, grads, dhidden_CD, row, stop)


def partial_stats(problem: HeadProblem, *, want_entropy: bool) -> PartialStats:
    """Launch the statistics kernel for each block of rows; return the softmax statistics of each
    split (part) of the vocabulary."""
    _check(problem)
    configs = _configs(problem)
    config = configs.stats_entropy if want_entropy else configs.stats
    rows, columns = problem.num_rows, int(problem.weight_VD.shape[0])
    device = problem.hidden_TD.device
    target_R = torch.zeros(rows, dtype=torch.float32, device=device)
    if rows == 0 or columns == 0:
        empty = torch.zeros((1, rows), dtype=torch.float32, device=device)
        lowest = torch.full_like(empty, torch.finfo(torch.float32).min)
        return PartialStats(lowest, empty, empty, target_R)
    tiles = triton.cdiv(columns, config.vocab)
    arrays = 3 if want_entropy else 2
    most_splits = max(1, problem.workspace_bytes // 8 // (4 * arrays * rows))
    # The size of a split is given in columns and not in tiles, because a smaller tile is used if
    # rows are not aligned.
    columns_per_split = triton.cdiv(tiles, min(tiles, most_splits)) * config.vocab
    splits = triton.cdiv(columns, columns_per_split)
    max_PR = torch.empty((splits, rows), dtype=torch.float32, device=device)
    sum_PR = torch.empty_like(max_PR)
    weighted_PR = torch.empty_like(max_PR) if want_entropy else max_PR
    block_rows = _forward_rows(problem)
    with on_device(problem.hidden_TD):
        for start in range(0, rows, block_rows):
            stop = min(start + block_rows, rows)
            hidden_CD = problem.hidden_block(start, stop).contiguous()
            tile, hidden, weight = _operands(config, hidden_CD, problem.weight_VD)
            head_stats_kernel[(triton.cdiv(stop - start, tile.tokens) * splits,)](
                hidden,
                weight,
                problem.targets_R[start:],
                max_PR[:, start:],
                sum_PR[:, start:],
                weighted_PR[:, start:],
                target_R[start:],
                stop - start,
                columns,
                int(hidden_CD.shape[1]),
                rows,
                columns_per_split,
                splits,
                problem.inv_temperature,
                **_tile_arguments(problem, tile, want_entropy),
            )
    return PartialStats(max_PR, sum_PR, weighted_PR, target_R)


def launch_dlogits(
    problem: HeadProblem,
    cotangents: HeadCotangents,
    hidden_CD: Tensor,
    dlogits_CB: Tensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> None:
    """Launch the kernel that fills one block of dLoss/dlogits in place."""
    weight_BD = problem.weight_VD[columns[0] : columns[1]]
    tile, hidden, weight = _operands(_configs(problem).dlogits, hidden_CD, weight_BD)
    at = slice(*rows)
    entropy_R, grad_entropy_R = cotangents.entropy_R, cotangents.grad_entropy_R
    with_entropy = entropy_R is not None and grad_entropy_R is not None
    row_tiles = triton.cdiv(rows[1] - rows[0], tile.tokens)
    column_tiles = triton.cdiv(columns[1] - columns[0], tile.vocab)
    dlogits_kernel[(row_tiles * column_tiles,)](
        hidden,
        weight,
        problem.targets_R[at],
        cotangents.log_sum_exp_R[at],
        cotangents.grad_logprob_R[at],
        cotangents.log_sum_exp_R[at] if grad_entropy_R is None else grad_entropy_R[at],
        cotangents.log_sum_exp_R[at] if entropy_R is None else entropy_R[at],
        dlogits_CB,
        rows[1] - rows[0],
        columns[1] - columns[0],
        int(hidden_CD.shape[1]),
        dlogits_CB.stride(0),
        columns[0],
        problem.inv_temperature,
        **_tile_arguments(problem, tile, with_entropy),
    )


def accumulate_product(
    out: Tensor, left: Tensor, right: Tensor, config: TileConfig, *, deterministic: bool
) -> None:
    """Compute out += left · right with float32 sums; `right` and `out` are row-major, `left` may
    have any layout."""
    if not deterministic:
        if out.dtype == left.dtype:
            torch.addmm(out, left, right, out=out)
            return
        if left.is_cuda and library_accumulates_float32(left.device, left.dtype):
            torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
            return
    rows, columns = int(out.shape[0]), int(out.shape[1])
    grid = (triton.cdiv(rows, config.tokens) * triton.cdiv(columns, config.vocab),)
    accumulate_product_kernel[grid](
        left,
        right,
        out,
        rows,
        columns,
        int(left.shape[1]),
        left.stride(0),
        left.stride(1),
        right.stride(0),
        out.stride(0),
        ROWS=config.tokens,
        COLUMNS=config.vocab,
        DEPTH=config.depth,
        GROUP=config.group,
        UPCAST=interpreted(),
        num_warps=config.warps,
        num_stages=config.stages,
    )


@cache
def library_accumulates_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the installed torch can add a half-precision product to a float32 matrix in
    place.

    It is tried out, because `addmm` has the argument `out_dtype` since torch 2.8, but its first
    versions reject a float32 matrix as the addend.
    """
    if "dtype_out" not in torch.ops.aten.addmm.overloads():
        return False
    out = torch.ones((16, 16), dtype=torch.float32, device=device)
    factor = torch.ones((16, 16), dtype=dtype, device=device)
    try:
        torch.addmm(out, factor, factor, out_dtype=torch.float32, out=out)
    except RuntimeError:
        return False
    return bool((out == 17).all())


def _add_products(
    problem: HeadProblem,
    grads: HeadGrads,
    hidden_CD: Tensor,
    dhidden_CD: Tensor | None,
    dlogits_CB: Tensor,
    columns: tuple[int, int],
) -> None:
    """Add the products of one block of dLoss/dlogits to the gradients: dlogits · weight to that of
    the hidden states, and dlogitsᵀ · hidden to that of the weight."""
    config = _configs(problem).product
    at = slice(*columns)
    options = {"deterministic": problem.deterministic}
    if dhidden_CD is not None:
        accumulate_product(dhidden_CD, dlogits_CB, problem.weight_VD[at], config, **options)
    if grads.dweight_VD is not None:
        accumulate_product(grads.dweight_VD[at], dlogits_CB.t(), hidden_CD, config, **options)


def _dhidden_block(
    problem: HeadProblem, grads: HeadGrads, hidden_CD: Tensor, start: int, stop: int
) -> Tensor | None:
    """Return a float32 array to which the gradient of one block's hidden states is added. It is a
    view of the result if that is float32 and all tokens take part, otherwise a new array of zeros.
    Return None if this gradient is not needed."""
    if grads.dhidden_TD is None:
        return None
    if problem.rows_R is None and grads.dhidden_TD.dtype == torch.float32:
        return grads.dhidden_TD[start:stop]
    return torch.zeros(hidden_CD.shape, dtype=torch.float32, device=hidden_CD.device)


def _write_dhidden(
    problem: HeadProblem, grads: HeadGrads, dhidden_CD: Tensor | None, start: int, stop: int
) -> None:
    if grads.dhidden_TD is None or dhidden_CD is None:
        return
    if problem.rows_R is not None:
        grads.dhidden_TD[problem.rows_R[start:stop]] = dhidden_CD.to(grads.dhidden_TD.dtype)
    elif grads.dhidden_TD.dtype != torch.float32:
        grads.dhidden_TD[start:stop] = dhidden_CD


def _forward_rows(problem: HeadProblem) -> int:
    """Return the number of rows of one block of the forward pass. These are all rows, unless hidden
    states must be copied into a contiguous array; then they are as many as fit into half of the
    workspace."""
    rows = problem.num_rows
    if problem.rows_R is not None or not problem.hidden_TD.is_contiguous():
        row_bytes = problem.hidden_TD.shape[1] * problem.hidden_TD.element_size()
        rows = min(rows, max(1, problem.workspace_bytes // 2 // row_bytes))
    return rows


def _configs(problem: HeadProblem) -> HeadConfigs:
    if not problem.hidden_TD.is_cuda:
        return INTERPRETER
    return head_configs(
        torch.cuda.get_device_capability(problem.hidden_TD.device), problem.hidden_TD.dtype
    )


def _operands(
    config: TileConfig, hidden_CD: Tensor, weight_BD: Tensor
) -> tuple[TileConfig, Any, Any]:
    """Return the tile shape and the operands of a kernel. The operands are tensor descriptors if
    `config` asks for them and the rows are aligned to 16 bytes; otherwise they are plain tensors,
    with the tile shape of `without_descriptors`."""
    row_bytes = hidden_CD.shape[1] * hidden_CD.element_size()
    aligned = all(t.data_ptr() % 16 == 0 for t in (hidden_CD, weight_BD)) and row_bytes % 16 == 0
    if not (config.descriptors and aligned):
        return without_descriptors(config), hidden_CD, weight_BD
    return (
        config,
        TensorDescriptor.from_tensor(hidden_CD, [config.tokens, config.depth]),
        TensorDescriptor.from_tensor(weight_BD, [config.vocab, config.depth]),
    )


def _tile_arguments(problem: HeadProblem, tile: TileConfig, entropy: bool) -> dict[str, Any]:
    even_depth = problem.hidden_TD.shape[1] % tile.depth == 0
    spec = TileSpec(tile, even_depth, interpreted(), entropy)
    return {"SPEC": spec, "num_warps": tile.warps, "num_stages": tile.stages}


def _check(problem: HeadProblem) -> None:
    if problem.hidden_TD.dtype not in DTYPES:
        raise ValueError(
            f"backend='triton' takes fp32, fp16 or bf16, got {problem.hidden_TD.dtype}"
        )
    if not problem.hidden_TD.is_cuda and not interpreted():
        raise ValueError("backend='triton' needs CUDA tensors (or TRITON_INTERPRET=1)")
    if not problem.weight_VD.is_contiguous():
        raise ValueError("backend='triton' needs a contiguous weight")


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which the tensor's device is current, because kernels launch on the
    current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()

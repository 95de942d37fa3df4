"""Microbatches through Megatron's schedule: scoring (forward only) and gradients.

Invariants
- Only tokens with `loss_mask_T` != 0 are scored, and sequences without any are not run at all.
- The loss of a microbatch is its share of a sum that is already divided by global counts; shares
  are added over microbatches and data-parallel ranks. A share that is not finite contributes no
  gradient and is reported, so that every rank still takes part in every collective.
- Between two microbatches the host waits for no result of the device: whether the shares were
  finite is read once, after the last.
- Whatever is returned is the same on every rank. One pipeline stage computes it (the last), one
  tensor rank counts it (the first), an all-reduce over all ranks spreads it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron_async_kernels.loss_types import (
    Denominators,
    LossInputs,
    LossMetrics,
    LossOutput,
    NonFiniteError,
    attach_gradient,
)
from torch import Tensor

from megatron_async.algorithms.algorithm import Algorithm
from megatron_async.algorithms.device_batch import DeviceBatch, to_device
from megatron_async.trainer.microbatch import plan_microbatches
from megatron_async.trainer.packed import PackedInputs, TokenLogprobs, pack_inputs
from megatron_async.trainer.parallel import RankLayout


@dataclass(frozen=True, eq=False)
class Microbatch:
    """A microbatch of this rank: model inputs and where its rows belong.

    `rows` holds its trained tokens alone, all that a loss sees; `index_R` are their positions in
    the batch's stream. A dummy (without rows) has two tokens that count for nothing.
    """

    packed: PackedInputs
    rows: DeviceBatch
    index_R: Tensor

    @property
    def is_dummy(self) -> bool:
        return len(self.index_R) == 0


@dataclass(frozen=True, eq=False)
class GradientResult:
    """Sums over all ranks. `reason`: why this rank's loss is not finite; None where it is.

    `logprobs_T` are those that the loss saw, 0 where nothing is trained.
    """

    metrics: LossMetrics
    logprobs_T: Tensor
    reason: str | None
    num_microbatches: int


class PolicyRunner:
    """Runs the model of this rank; holds no state of its own between calls.

    `model` is in Megatron's data-parallel wrapper where gradients are asked for.
    """

    def __init__(
        self,
        model: MegatronModule,
        layout: RankLayout,
        *,
        token_budget: int,
        hidden_size: int,
    ) -> None:
        self._model = model
        self._layout = layout
        self._token_budget = token_budget
        self._hidden_size = hidden_size
        self._counts = layout.is_last_stage and layout.tensor_rank == 0

    def _microbatches(self, batch: DeviceBatch) -> list[Microbatch]:
        """This rank's; as many as any other rank's."""
        lengths_S, trained_S = batch.sizes()
        used_S = np.flatnonzero(trained_S)
        plan = plan_microbatches(
            lengths_S[used_S],
            data_parallel=self._layout.data_size,
            token_budget=self._token_budget,
            hidden_size=self._hidden_size,
        )
        mine = [used_S[chosen] for chosen in plan[self._layout.data_rank]]
        order_S = to_device(np.concatenate(mine), self._layout.device)
        parts = order_S.split([len(chosen) for chosen in mine])
        return [build_microbatch(batch, sequences) for sequences in parts]

    @torch.no_grad()
    def logprobs(self, batch: DeviceBatch) -> Tensor:
        """log pi(token) at the batch's temperature where the loss mask is set, else 0, [T]."""

        def nothing(_output: TokenLogprobs, _micro: Microbatch) -> Tensor:
            return self._zero()

        microbatches = self._microbatches(batch)
        return self._run(microbatches, batch, nothing, forward_only=True, entropy=False)

    def gradients(
        self,
        batch: DeviceBatch,
        algorithm: Algorithm,
        denominators: Denominators,
        *,
        entropy: bool,
    ) -> GradientResult:
        """Add the gradient of a prepared minibatch's loss to the gradient buffers, reduced.

        The loss is computed on the last stage, for every microbatch that is not a dummy.
        """
        microbatches = self._microbatches(batch)
        metrics = LossMetrics.empty(self._layout.device)
        seen: list[LossInputs] = []
        finite: list[Tensor] = []

        def share(output: TokenLogprobs, micro: Microbatch) -> Tensor:
            nonlocal metrics
            if micro.is_dummy:
                return output.logprobs_R.sum() * 0.0
            inputs = algorithm.inputs(micro.rows, output.logprobs_R, output.entropy_R)
            found = algorithm.loss(inputs, denominators, check=False)
            seen.append(inputs)
            finite.append(found.finite)
            metrics = metrics.merge(found.metrics)
            found = _if(found.finite, found)
            return attach_gradient(found, output.logprobs_R, output.entropy_R)

        logprobs_T = self._run(microbatches, batch, share, forward_only=False, entropy=entropy)
        reason = None
        if finite and not all(finite_M := torch.stack(finite).tolist()):
            reason = _reason(algorithm, seen[finite_M.index(False)], denominators)
        counted = metrics if self._counts else LossMetrics.empty(self._layout.device)
        return GradientResult(
            metrics=counted.all_reduce(dist.group.WORLD),
            logprobs_T=logprobs_T,
            reason=reason,
            num_microbatches=len(microbatches),
        )

    def _zero(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((), dtype=dtype, device=self._layout.device)

    def _run(
        self,
        microbatches: list[Microbatch],
        batch: DeviceBatch,
        share: Callable[[TokenLogprobs, Microbatch], Tensor],
        *,
        forward_only: bool,
        entropy: bool,
    ) -> Tensor:
        """Megatron's schedule (1F1B where there are pipeline stages).

        `share` is a microbatch's part of the loss. Returns the log-probs of all ranks, in the order
        of the batch, 0 where nothing is trained.
        """
        logprobs_T = torch.zeros(batch.num_tokens, dtype=torch.float32, device=self._layout.device)

        def forward_step(
            iterator: Iterator[Microbatch], model: MegatronModule
        ) -> tuple[Any, Callable[[TokenLogprobs], tuple[Tensor, Tensor, None]]]:
            micro = next(iterator)
            output = model(micro.packed, temperature=batch.temperature, return_entropy=entropy)

            def finish(found: TokenLogprobs) -> tuple[Tensor, Tensor, None]:
                """Value, a token count (unused here) and things to report, as Megatron wants."""
                if self._counts and not micro.is_dummy:
                    logprobs_T[micro.index_R] = found.logprobs_R.detach().float()
                return share(found, micro), self._zero(torch.int), None

            return output, finish

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=[self._model],
            num_microbatches=len(microbatches),
            seq_length=self._token_budget,  # Not read: the stages send each other the shapes.
            micro_batch_size=1,
            forward_only=forward_only,
        )
        dist.all_reduce(logprobs_T)  # one rank counts each token
        return logprobs_T


def _if(finite: Tensor, found: LossOutput) -> LossOutput:
    """The same loss, with a gradient of zero if it is not finite."""

    def gated(gradient_R: Tensor) -> Tensor:
        return torch.where(finite, gradient_R, torch.zeros_like(gradient_R))

    dentropy_R = None if found.dentropy_T is None else gated(found.dentropy_T)
    return replace(found, dlogp_T=gated(found.dlogp_T), dentropy_T=dentropy_R)


def _reason(algorithm: Algorithm, inputs: LossInputs, denominators: Denominators) -> str:
    """Explain why the loss of these is not finite. Waits for the device."""
    try:
        algorithm.loss(inputs, denominators)
    except NonFiniteError as error:
        return str(error)
    return "the loss is not finite"


def build_microbatch(batch: DeviceBatch, sequences: Tensor) -> Microbatch:
    """Pack these sequences of the batch end to end; a dummy for none."""
    part, index_T = batch.select(sequences), batch.tokens_of(sequences)
    if not len(index_T):
        return Microbatch(_dummy(batch.loss_mask_T.device), part, index_T)
    packed = pack_inputs(part.token_ids_T, part.cu_seqlens_S1, part.loss_mask_T)
    return Microbatch(packed, part.trained(), index_T[packed.response_index_R])


def _dummy(device: torch.device) -> PackedInputs:
    """Two tokens, of which the second is asked for."""
    position_ids_T = torch.arange(2, device=device)
    borders_S1 = 2 * position_ids_T
    return pack_inputs(torch.zeros_like(position_ids_T), borders_S1, position_ids_T)

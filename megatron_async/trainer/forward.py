"""Runs microbatches through Megatron's pipeline schedule, to compute log-probs or gradients.

Invariants
- Log-probs are computed only for trained tokens, those with `loss_mask_T` != 0. Sequences without
  trained tokens are not run.
- The loss of a minibatch is divided by counts of the whole minibatch (`Denominators`), so the
  losses of its microbatches on all data-parallel ranks add up to it. If the loss of a microbatch is
  not finite, its gradient is set to zero and the reason is reported, so that every rank still takes
  part in every collective.
- Between two microbatches, the host does not wait for the device: whether the losses were finite is
  read once, after the last microbatch.
- Results are the same on every rank: the last pipeline stage computes them, its first tensor rank
  contributes them, and an all-reduce over all ranks distributes them.
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
    """A microbatch of this rank: the inputs of the model, and what the loss of its trained tokens
    needs.

    A dummy microbatch, which a rank runs if it has fewer microbatches than other ranks, has no
    trained tokens; the model then runs on two tokens that do not affect the result.

    Attributes:
        packed: Inputs of the model.
        rows: The values that the loss needs, of the trained tokens only.
        index_R: Positions of the trained tokens in the token stream of the batch.
    """

    packed: PackedInputs
    rows: DeviceBatch
    index_R: Tensor

    @property
    def is_dummy(self) -> bool:
        return len(self.index_R) == 0


@dataclass(frozen=True, eq=False)
class GradientResult:
    """Result of a gradient computation.

    Attributes:
        metrics: Metrics of the loss, summed over all ranks.
        logprobs_T: Log-probs of the trained tokens, from which the loss was computed; 0 for other
            tokens.
        reason: Reason why a loss of this rank is not finite; None if all are finite.
        num_microbatches: Number of microbatches that each rank ran.
    """

    metrics: LossMetrics
    logprobs_T: Tensor
    reason: str | None
    num_microbatches: int


class PolicyRunner:
    """Computes log-probs and gradients with this rank's part of the model; keeps no state between
    calls.

    `model` must be wrapped in Megatron's DistributedDataParallel if gradients are computed.
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
        """Return this rank's microbatches of the batch; every rank gets the same number."""
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
        chunks = order_S.split([len(chosen) for chosen in mine])
        return [build_microbatch(batch, sequences) for sequences in chunks]

    @torch.no_grad()
    def logprobs(self, batch: DeviceBatch) -> Tensor:
        """Return log pi(token) of each trained token of the batch at its sampling temperature, and
        0 for other tokens, [T]."""

        def no_loss(_output: TokenLogprobs, _micro: Microbatch) -> Tensor:
            return self._zero()

        microbatches = self._microbatches(batch)
        return self._run(microbatches, batch, no_loss, forward_only=True, entropy=False)

    def gradients(
        self,
        batch: DeviceBatch,
        algorithm: Algorithm,
        denominators: Denominators,
        *,
        entropy: bool,
    ) -> GradientResult:
        """Compute the gradient of a minibatch's loss in Megatron's gradient buffers, which must be
        zero before, and sum it over all ranks that have computed a part of it.

        The loss is computed on the last pipeline stage, for every microbatch that is not a dummy.

        Args:
            batch: Minibatch that the algorithm has prepared.
            algorithm: Computes the loss.
            denominators: Global counts by which the loss is divided.
            entropy: Whether the entropy of each token's distribution is computed too.
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
            found = _zero_gradient_unless(found.finite, found)
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
        """Run the microbatches through Megatron's schedule (1F1B with several pipeline stages).

        Args:
            microbatches: This rank's microbatches.
            batch: The batch that they were taken from.
            share: Function that returns the loss of a microbatch from the model's output.
            forward_only: Whether to skip the backward pass.
            entropy: Whether the model returns entropies.

        Returns:
            The log-probs of the trained tokens of the whole batch, from all ranks; 0 for other
            tokens.
        """
        logprobs_T = torch.zeros(batch.num_tokens, dtype=torch.float32, device=self._layout.device)

        def forward_step(
            iterator: Iterator[Microbatch], model: MegatronModule
        ) -> tuple[Any, Callable[[TokenLogprobs], tuple[Tensor, Tensor, None]]]:
            micro = next(iterator)
            output = model(micro.packed, temperature=batch.temperature, return_entropy=entropy)

            def finish(found: TokenLogprobs) -> tuple[Tensor, Tensor, None]:
                """Return the three values that Megatron requires: the loss, a token count, which is
                not used, and data to report, of which there are none."""
                if self._counts and not micro.is_dummy:
                    logprobs_T[micro.index_R] = found.logprobs_R.detach().float()
                return share(found, micro), self._zero(torch.int), None

            return output, finish

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=[self._model],
            num_microbatches=len(microbatches),
            # Required, but not read: with `variable_seq_lengths`, stages send each other the
            # shapes.
            seq_length=self._token_budget,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        # For each token, exactly one rank has its log-prob, and all others have 0.
        dist.all_reduce(logprobs_T)
        return logprobs_T


def _zero_gradient_unless(finite: Tensor, found: LossOutput) -> LossOutput:
    """Return the loss `found`, with a zero gradient if the tensor `finite` is False."""

    def gated(gradient_R: Tensor) -> Tensor:
        return torch.where(finite, gradient_R, torch.zeros_like(gradient_R))

    dentropy_R = None if found.dentropy_T is None else gated(found.dentropy_T)
    return replace(found, dlogp_T=gated(found.dlogp_T), dentropy_T=dentropy_R)


def _reason(algorithm: Algorithm, inputs: LossInputs, denominators: Denominators) -> str:
    """Return why the loss of `inputs` is not finite. To find out, compute the loss again with
    checks, which wait for the device."""
    try:
        algorithm.loss(inputs, denominators)
    except NonFiniteError as error:
        return str(error)
    return "the loss is not finite"


def build_microbatch(batch: DeviceBatch, sequences: Tensor) -> Microbatch:
    """Return a microbatch with the sequences of the batch whose indices are in `sequences`; return
    a dummy microbatch if there are none."""
    selected, index_T = batch.select(sequences), batch.tokens_of(sequences)
    if not len(index_T):
        return Microbatch(_dummy(batch.loss_mask_T.device), selected, index_T)
    packed = pack_inputs(selected.token_ids_T, selected.cu_seqlens_S1, selected.loss_mask_T)
    return Microbatch(packed, selected.trained(), index_T[packed.response_index_R])


def _dummy(device: torch.device) -> PackedInputs:
    """Return the inputs of a dummy microbatch: two tokens, of which the second gets a log-prob that
    is not used."""
    position_ids_T = torch.arange(2, device=device)
    borders_S1 = 2 * position_ids_T
    return pack_inputs(torch.zeros_like(position_ids_T), borders_S1, position_ids_T)

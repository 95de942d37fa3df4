"""Estimates the seconds of the trainer's work and of a weight update.

Training on one batch of B sequences in H updates, `epochs` times, takes

    epochs * H * (seconds of the sequences on the busiest data-parallel rank * pipeline factor
                  + gradient reduction and parameter gathering + update_overhead_seconds)
    + batch_overhead_seconds

- Seconds per token: (per-parameter FLOPs * active parameters + FLOPs of attention) / (TP * PP * CP
  * F * e_t), plus tensor-parallel communication. F is the GPU's peak FLOP/s, and e_t the share of
  it that is reached (`simulate.efficiency.training_flops`). Per-parameter FLOPs are 6, plus 2 for
  each further forward pass: recomputation in each epoch, and the passes for pi_old and the
  reference policy once for all epochs. Attention is counted with the same number of passes; a token
  attends on average to half of the tokens of its sequence. So long sequences cost more per token.
- Sequences are packed, or padded to the longest one of the whole batch (`simulate.padding`). A
  padding token costs as much as a real token. A trainer that pads only to the longest sequence of
  each rank would take the same time, because the other ranks wait for the rank with the longest
  one.
- The busiest rank needs at least as long as for the longest sequence, which is never split over
  data-parallel ranks, and at least the mean time per rank. So with a fixed batch, the time shrinks
  less and less with more ranks. Sequences are assumed to be balanced by their cost otherwise.
- The pipeline factor is 1 + (PP - 1) / microbatches (Narayanan et al., arXiv 2104.04473).
- Gradients are reduced in fp32 and parameters gathered in bf16 over the data-parallel ranks. The
  share `simulate.efficiency.reduction_overlap` of this time overlaps the passes; the default 0 is
  assumed.

A weight update sends the bf16 weights once over the network. One rank of each pipeline stage sends
to all engines at the same time; the stages send one after the other (`weight_sync/stage_order.py`).
The bandwidth is the share `simulate.efficiency.weight_update` of the network's. If engines are on
the trainer's GPUs, every rank gathers all weights over NVLink instead. Engines and trainer wait
until the update has ended.

With `simulate.background_publication`, the trainer waits only while the sender of each pipeline
stage copies the weights of its stage to host memory; the senders copy at the same time. The
transfer takes as long as above, while trainer and engines work. Engines then pause while each of
their GPUs copies its shard of the weights from host memory, and for the fixed cost of an update.
Both copies use the share `simulate.efficiency.links` of the PCIe bandwidth.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async.config.model import ParallelConfig, Recompute
from megatron_async.config.simulate import SimulateConfig
from megatron_async.models.shape import BF16, ModelShape
from megatron_async.simulate.engine_costs import all_reduce_seconds
from megatron_async.simulate.hardware import Gpu
from megatron_async.simulate.memory import (
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    offloaded_bytes,
)
from megatron_async.simulate.recomputation import recomputed_passes
from megatron_async.weight_sync.stage_order import SENDERS_AT_ONCE


@dataclass(frozen=True)
class TrainerCosts:
    """Cost model of a run's trainer and its weight updates.

    Attributes:
        shape: Shape of the model.
        gpu: Peak figures of a GPU.
        layout: Numbers of ranks and of parallel shards.
        settings: Settings of the simulation.
        microbatch_tokens: Number of tokens of a microbatch (`trainer.microbatch_tokens`).
        sharded_optimizer: Whether data-parallel ranks split the optimizer state.
        epochs: Number of times that a batch is trained on.
        recompute: Value of `trainer.recompute`.
        engine_tensor: Number of GPUs of one engine.
    """

    shape: ModelShape
    gpu: Gpu
    layout: ParallelConfig
    settings: SimulateConfig
    microbatch_tokens: int
    sharded_optimizer: bool
    epochs: int
    recompute: Recompute
    engine_tensor: int

    @property
    def _model_ranks(self) -> int:
        """Number of ranks over which the parameters of one model replica are split."""
        return self.layout.tensor * self.layout.pipeline

    def batch_seconds(self, sequence_tokens: Sequence[int], updates: int) -> float:
        """Return the seconds of training on one batch for all epochs.

        Args:
            sequence_tokens: Number of prompt and response tokens of each sequence.
            updates: Number of optimizer updates per epoch.
        """
        count = len(sequence_tokens)
        if self.settings.padding == "batch":
            sequence_tokens = [max(sequence_tokens)] * count
        ends = [count * i // updates for i in range(updates + 1)]
        return self.settings.efficiency.batch_overhead_seconds + self.epochs * sum(
            self._update_seconds(sequence_tokens[first:last])
            for first, last in itertools.pairwise(ends)
        )

    def _update_seconds(self, sequence_tokens: Sequence[int]) -> float:
        tokens = sum(sequence_tokens)
        if self.settings.trainer_seconds_per_token is not None:
            return tokens * self.settings.trainer_seconds_per_token + self.fixed_seconds
        longest, data = max(sequence_tokens), self.layout.data
        mean_context = sum(n * n for n in sequence_tokens) / max(1, tokens) / 2
        seconds = max(
            tokens / data * self._token_seconds(mean_context),
            longest * self._token_seconds(longest / 2),
        )
        microbatches = math.ceil(max(tokens / data, longest) / self.microbatch_tokens)
        bubble = 1 + (self.layout.pipeline - 1) / max(1, microbatches)
        return seconds * bubble + self.fixed_seconds

    @property
    def passes(self) -> float:
        """Training work per token and epoch, including recomputation and passes without gradient,
        in units of one forward pass of the model."""
        extra = self.settings.extra_forward_passes / self.epochs
        trained = self.settings.training_flops_per_parameter / 2
        layers = self.shape.layers / self.layout.pipeline
        return trained + recomputed_passes(self.shape, layers, self.recompute) + extra

    def _token_seconds(self, mean_context: float) -> float:
        """Return the seconds that training takes per token on the ranks of one model replica, if a
        token attends to `mean_context` keys on average."""
        shape, layout, e = self.shape, self.layout, self.settings.efficiency
        flops = 2 * shape.active_parameters + shape.attention_flops_per_token_pair * mean_context
        ranks = self._model_ranks * layout.context
        compute = self.passes * flops / (ranks * self.gpu.flops * e.training_flops)
        if layout.tensor == 1:
            return compute
        # Each layer does two all-reduces per pass. Their latency occurs once per microbatch, not
        # per token, so their time is computed for a whole microbatch and divided by its tokens.
        size = self.microbatch_tokens * shape.hidden * BF16
        reduce = all_reduce_seconds(size, layout.tensor, self.gpu.nvlink, e)
        layers = shape.layers / layout.pipeline
        communication = self.passes * 2 * layers * reduce / self.microbatch_tokens
        return compute + communication / layout.context

    @property
    def fixed_seconds(self) -> float:
        """Seconds of one optimizer update that do not depend on the batch: gradient reduction,
        parameter gathering, and the overhead of the update."""
        if self.settings.trainer_seconds_per_update is not None:
            return self.settings.trainer_seconds_per_update
        e, layout = self.settings.efficiency, self.layout
        replicas = layout.data * layout.context
        size = (GRADIENT_BYTES + WEIGHT_BYTES) * self.shape.parameters / self._model_ranks
        moved = size * (replicas - 1) / replicas
        one_node = layout.ranks <= self.settings.gpus_per_node
        link = self.gpu.nvlink if one_node else self.gpu.network
        waited = (1 - e.reduction_overlap) * moved / (link * e.links)
        return waited + e.update_overhead_seconds

    @property
    def publish_seconds(self) -> float:
        """Seconds of a weight update, from the time at which the scheduler permits it until all
        engines serve the new version: transfer and loading, or only loading if the transfer
        precedes it in the background."""
        e = self.settings.efficiency
        size = BF16 * self.shape.parameters
        if self.settings.background_publication:
            load = size / self.engine_tensor / (self.gpu.pcie * e.links)
            return load + e.weight_update_overhead_seconds
        if self.settings.weight_update_seconds is not None:
            return self.settings.weight_update_seconds
        if self.settings.placement == "colocated":
            seconds = size / (self.gpu.nvlink * e.links)
            return seconds + e.weight_update_overhead_seconds + self.switch_seconds
        return self._sending_seconds + e.weight_update_overhead_seconds

    @property
    def _sending_seconds(self) -> float:
        """Seconds to send all weights once over the network."""
        sent = SENDERS_AT_ONCE * self.gpu.network * self.settings.efficiency.weight_update
        return BF16 * self.shape.parameters / sent

    @property
    def copy_seconds(self) -> float:
        """Seconds for which the trainer copies weights to host memory for a transfer in the
        background."""
        size = BF16 * self.shape.parameters / self.layout.pipeline
        return size / (self.gpu.pcie * self.settings.efficiency.links)

    @property
    def background_seconds(self) -> float:
        """Seconds of a transfer in the background."""
        measured = self.settings.weight_update_seconds
        return self._sending_seconds if measured is None else measured

    @property
    def switch_seconds(self) -> float:
        """Seconds to copy weights and optimizer state to host memory, or back, when trainer and
        engines share GPUs with offloading; 0 otherwise."""
        if self.settings.placement != "colocated" or not self.settings.offload:
            return 0.0
        moved = offloaded_bytes(self.shape, self.layout, sharded=self.sharded_optimizer)
        return moved / (self.gpu.pcie * self.settings.efficiency.links)

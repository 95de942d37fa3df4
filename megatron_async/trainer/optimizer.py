"""Builds Megatron's optimizer with Adam or Muon, and applies updates whose loss and gradient are
finite.

Invariants
- Gradients are summed over data-parallel ranks and microbatches, and never averaged, because the
  loss is already divided by counts of the whole minibatch. Megatron's setting
  `calculate_per_token_loss` turns its averaging off, and `finalize` in this module leaves out its
  division by token counts.
- The learning rate is a pure function of the number of updates made, so it is neither saved nor
  restored.
- An update with a non-finite loss or gradient norm on any rank is applied on no rank.

Megatron uses Transformer Engine's or Apex's fused Adam, norm and scaling where they are installed,
and torch's AdamW otherwise. The log names the one in use.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron_async.checkpoint.manifest import ADAM
from megatron_async.config.model import OptimizerConfig
from megatron_async.models.parameters import unwrap
from megatron_async.trainer.device import current_device, has_cuda
from megatron_async.trainer.muon import Muon, matrices


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Return the learning rate of update number `update` (from 0): linear warm-up, then constant or
    cosine.

    While update < warmup_steps, the rate is lr * (update + 1) / (warmup_steps + 1), so that no
    update has rate 0. Then the rate is lr, or the cosine (Loshchilov and Hutter 2017, arXiv
    1608.03983, eq. 5, one period) that falls from lr to min_lr at update total_updates and stays
    there.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_updates - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / span)
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1.0 + math.cos(math.pi * progress))


def wrap_data_parallel(
    model: MegatronModule, config: OptimizerConfig, *, bf16: bool
) -> DistributedDataParallel:
    """Wrap the model in Megatron's DistributedDataParallel, which sums gradients over data-parallel
    ranks.

    Gradients are accumulated in contiguous float32 buffers. The functions by which Megatron's
    pipeline schedules delay and finish the sum over ranks are set in the model's config. On GPUs,
    gradients are summed while the backward pass continues; on a CPU, after it.
    """
    transformer_config = model.config
    wrapped = DistributedDataParallel(
        transformer_config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=bf16,
            overlap_grad_reduce=has_cuda(),
            use_distributed_optimizer=config.sharded,
        ),
        model,
    )
    transformer_config.finalize_model_grads_func = finalize
    transformer_config.no_sync_func = wrapped.no_sync
    return wrapped


def finalize(
    models: list[MegatronModule], _num_tokens: torch.Tensor | None = None, **groups: Any
) -> None:
    """Sum each parameter's gradient over all ranks that have computed a part of it.

    These are the data-parallel ranks and, for a tied embedding, the first and last pipeline stages.
    For norms and routers, they are also the tensor ranks, if each of them has processed only some
    of the tokens (`parallel.sequence`) or heads (norms of queries and keys). Megatron's
    `finalize_model_grads` would then divide by the number of tokens. That is left out, because the
    loss is already divided.
    """
    finalize_model_grads(models, None, **groups)


def build_optimizer(
    model: DistributedDataParallel, config: OptimizerConfig, *, bf16: bool
) -> ChainedOptimizer:
    """Build Megatron's optimizer, with its state allocated.

    Weight decay is decoupled, and is not applied to norms and biases.
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=config.sharded,
        ),
        [model],
    )
    by_muon = matrices(unwrap(model)) if config.name == "muon" else {}
    for part in optimizer_parts(optimizer):
        groups = part.optimizer.param_groups
        # Megatron's own scheduler would set the weight decay of each group, but it is not used
        # here.
        for group in groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        if config.name == "muon":
            precision = torch.bfloat16 if bf16 else torch.float32
            part.optimizer = Muon(groups, by_muon, config.muon_momentum, precision)
        _allocate_state(part)
    return optimizer


def optimizer_parts(optimizer: ChainedOptimizer) -> list[Any]:
    """Return Megatron's optimizers for dense weights and for expert weights, if this rank has such
    weights."""
    return [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def _allocate_state(part: Any) -> None:
    """Allocate the optimizer's state, with zero moments, before the first step. Otherwise a
    checkpoint of step 0 would contain other tensors than later checkpoints. torch's AdamW also
    needs a `step` for each parameter, which Megatron's function for this does not create."""
    inner = part.optimizer
    if not isinstance(inner, torch.optim.AdamW):
        part.init_state_fn(inner, part.config)
        return
    for group in inner.param_groups:
        for parameter in group["params"]:
            # Not for Muon's matrices: Muon has allocated their state.
            if parameter not in inner.state:
                moments = {moment: torch.zeros_like(parameter) for moment in ADAM}
                inner.state[parameter] = {"step": torch.tensor(0.0), **moments}


def set_applied_updates(optimizer: ChainedOptimizer, count: int) -> None:
    """Set the number of updates that Adam has made, by which it corrects the bias of its moments.
    Muon has no such number.

    torch's AdamW keeps the number for each parameter. The fused optimizers keep it for each
    parameter group, and a group has no number before the first update.
    """
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(count)
            continue
        for group in part.optimizer.param_groups:
            group.pop("step", None)
            if count:
                group["step"] = count


def guarded_step(
    optimizer: ChainedOptimizer, *, rate: float, loss_is_finite: bool
) -> tuple[bool, float]:
    """Clip and apply the gradients in the buffers, unless the loss or the gradient norm of any rank
    is not finite.

    Megatron's own `step` would apply gradients whose norm is NaN, because every comparison with NaN
    is false. So this function calls the same public methods as `step`, with a check in between. The
    check costs one all-reduce of a scalar.

    Args:
        optimizer: Megatron's optimizer.
        rate: Learning rate of the update.
        loss_is_finite: Whether this rank's loss is finite.

    Returns:
        Whether the gradients were applied, the same on every rank, and their norm before clipping.
    """
    found_inf = optimizer.prepare_grads()
    grad_norm = gradient_norm(optimizer)
    nonfinite = found_inf or not loss_is_finite or not math.isfinite(grad_norm)
    flag = torch.tensor([float(nonfinite)], device=current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag.item() > 0:
        return False, grad_norm
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
    for part in optimizer_parts(optimizer):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    return bool(optimizer.step_with_ready_grads()), grad_norm


def gradient_norm(optimizer: ChainedOptimizer) -> float:
    """Return the Euclidean norm of the whole model's gradient. Collective.

    On a CPU the squares are summed in float64. Megatron would call `torch.norm` in float32, which
    is not accurate on a CPU: for `torch.randn(136_000_000)`, its result is 1.4 % too small.
    """
    if has_cuda():
        return float(optimizer.get_grad_norm())
    square = 0.0
    for part in optimizer.chained_optimizers:
        norms = [
            # The norm is computed in pieces, because it copies its whole argument to float64.
            torch.linalg.vector_norm(piece, dtype=torch.float64)
            for gradient in _gradients_of(part)
            for piece in gradient.flatten().split(1 << 20)
        ]
        square_1 = torch.zeros(1, dtype=torch.float64) + sum(norm.square() for norm in norms)
        dist.all_reduce(square_1, group=part.get_grad_stats_parallel_group())
        square += square_1.item()
    return math.sqrt(square)


def _gradients_of(part: Any) -> list[torch.Tensor]:
    """Return the gradients that this rank contributes to the gradient norm.

    Each element of the model's gradient is contributed by exactly one of the ranks over which the
    norm is summed.
    """
    if hasattr(part, "get_grads_for_grad_norm"):  # The method's name in newer versions of Megatron.
        return list(part.get_grads_for_grad_norm())
    return list(part.get_main_grads_for_grad_norm())


def zero_gradients(model: DistributedDataParallel, optimizer: ChainedOptimizer) -> None:
    """Set all gradients to zero; call this before the first microbatch of an update."""
    model.zero_grad_buffer()
    optimizer.zero_grad()

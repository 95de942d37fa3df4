"""Estimates GPU memory: the KV cache of an engine, and the state, the activations and the optimizer
step of a trainer rank.

With mixed precision, fp32 main gradients and an optimizer that is distributed over DP data-parallel
ranks, the state takes 2 + 4 + 12 / DP bytes per parameter (Megatron-core; Rajbhandari et al., arXiv
1910.02054). Activations are counted in the module `recomputation`. The optimizer step takes memory
too, because on a GPU torch's Adam computes the square roots of all second moments of a parameter
group at once (`torch.optim.adam`, `_multi_tensor_adam`). Apex's Adam and Transformer Engine's Adam
would not need it, because each is a single kernel.

tests/config/test_stage_memory.py compares the estimated state and peak with the memory that the
trainer's code allocates.
"""

from dataclasses import dataclass

from megatron_async.config.model import ParallelConfig, Recompute
from megatron_async.models.shape import BF16, ModelShape
from megatron_async.simulate.recomputation import kept_bytes

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Bytes per parameter of the weight (bf16), the gradient (fp32), and the optimizer state (fp32
master weight and Adam's two moments)."""
STEP_BYTES = 4
"""Additional bytes during the optimizer step, for each parameter that the rank's optimizer updates:
the square root of the second moment."""
LOGIT_BYTES = 8
"""Bytes of one logit and its gradient in float32. They exist only for one chunk of tokens at a
time."""
PAUSED_ENGINE_BYTES = 5e9
"""Bytes of a paused engine on a shared GPU: CUDA context, graphs, workspaces (assumed)."""
COMMUNICATOR_BYTES = 1 << 30
"""Bytes of NCCL's buffers for the process group over which an engine receives weights, if NVLink
SHARP (NVLS) is used."""


@dataclass(frozen=True)
class TrainerMemory:
    """Estimated memory of one trainer GPU in bytes.

    Attributes:
        state: Weights, gradients and optimizer state, which exist all the time.
        activations: Additional bytes during forward and backward passes.
        optimizer_step: Additional bytes during the optimizer's step.
    """

    state: float
    activations: float
    optimizer_step: float

    @property
    def peak(self) -> float:
        """Peak memory in bytes: the state, and either the activations or the buffers of the
        optimizer's step, which never exist at the same time."""
        return self.state + max(self.activations, self.optimizer_step)


def trainer_memory(
    shape: ModelShape,
    layout: ParallelConfig,
    *,
    sharded: bool,
    microbatch_tokens: int,
    logit_tokens: int,
    recompute: Recompute,
    expert: int = 1,
) -> TrainerMemory:
    """Estimate the memory of a trainer GPU: the state of a pipeline stage with the mean number of
    parameters, and the activations of the first stage, which has the most.

    Args:
        shape: Shape of the model.
        layout: Numbers of ranks and of parallel shards.
        sharded: Whether data-parallel ranks split the optimizer state.
        microbatch_tokens: Number of tokens of a microbatch.
        logit_tokens: Number of tokens whose logits exist at once.
        recompute: Value of `trainer.recompute`.
        expert: Number of ranks over which the experts of a layer are spread; see
            `trainer_state_bytes`.
    """
    _, stepped = _parameters(shape, layout, sharded, expert)
    activations = activation_bytes(
        shape,
        layout,
        microbatch_tokens=microbatch_tokens,
        logit_tokens=logit_tokens,
        recompute=recompute,
    )
    state = trainer_state_bytes(shape, layout, sharded=sharded, expert=expert)
    return TrainerMemory(state, activations, STEP_BYTES * stepped)


def trainer_state_bytes(
    shape: ModelShape, layout: ParallelConfig, *, sharded: bool, expert: int = 1
) -> float:
    """Return the bytes of the weights, main gradients and optimizer state on one trainer GPU.

    Muon's state is counted like Adam's, although Adam's has one moment more.

    Args:
        shape: Shape of the model.
        layout: Numbers of ranks and of parallel shards.
        sharded: Whether data-parallel ranks split the optimizer state.
        expert: Number of tensor and data-parallel ranks over which whole experts of a layer are
            spread. With 1, as the planner assumes, the experts are counted like other weights: each
            rank has its tensor-parallel share of all experts.
    """
    held, stepped = _parameters(shape, layout, sharded, expert)
    return held * (WEIGHT_BYTES + GRADIENT_BYTES) + stepped * OPTIMIZER_BYTES


def offloaded_bytes(shape: ModelShape, layout: ParallelConfig, *, sharded: bool) -> float:
    """Return the bytes of one trainer GPU's state that an offload copies to host memory: weights
    and optimizer state. Gradients are freed instead."""
    held, stepped = _parameters(shape, layout, sharded, expert=1)
    return held * WEIGHT_BYTES + stepped * OPTIMIZER_BYTES


def _parameters(
    shape: ModelShape, layout: ParallelConfig, sharded: bool, expert: int
) -> tuple[float, float]:
    """Return the mean number of parameters on a rank over all pipeline stages, and the number of
    parameters that the rank's optimizer updates."""
    experts: float = shape.mlp_parameters * shape.experts if expert > 1 else 0
    dense = (shape.parameters - experts) / (layout.tensor * layout.pipeline)
    experts /= layout.pipeline * expert
    if not sharded:
        return dense + experts, dense + experts
    replicas = layout.ranks / layout.pipeline / expert
    return dense + experts, dense / (layout.data * layout.context) + experts / replicas


def checkpoint_bytes(shape: ModelShape) -> float:
    """Return the estimated bytes of one checkpoint: master weights and Adam's moments. Muon's state
    is counted like Adam's."""
    return OPTIMIZER_BYTES * shape.parameters


def activation_bytes(
    shape: ModelShape,
    layout: ParallelConfig,
    *,
    microbatch_tokens: int,
    logit_tokens: int,
    recompute: Recompute,
) -> float:
    """Return the bytes of activations and logits on a GPU of the first pipeline stage. In the 1F1B
    schedule, this stage keeps the activations of the most microbatches."""
    tokens = microbatch_tokens / layout.context
    per_unit = tokens * shape.hidden / layout.tensor
    in_flight = layout.pipeline
    kept, recomputed = kept_bytes(shape, shape.layers / layout.pipeline, recompute)
    held = per_unit * (in_flight * kept + recomputed)
    return held + logit_tokens * shape.vocab / layout.tensor * LOGIT_BYTES


def update_bytes(shape: ModelShape, bucket_bytes: int, stages: int) -> float:
    """Return the bytes that a weight update needs on an engine's GPU in addition to weights and KV
    cache, if `stages` pipeline stages send the weights.

    The engine has up to two buckets of weights in memory at a time (`weight_sync/prefetch.py`). A
    tensor larger than a bucket is a bucket by itself, and the largest tensors are the embedding and
    the output head, which have the same size. If a single stage sends all weights and these two are
    not tied, both may be in memory at once, otherwise only one of them. Each stage sends over a
    separate process group with separate NCCL buffers.
    """
    largest = max(bucket_bytes, BF16 * shape.head_parameters)
    other = largest if stages == 1 and not shape.tied else bucket_bytes
    return largest + other + stages * COMMUNICATOR_BYTES


def kv_capacity_tokens(
    shape: ModelShape, memory: float, share: float, tensor: int, trainer_bytes: float
) -> int:
    """Return the number of tokens that fit into the KV cache of one engine; 0 or less if the
    weights alone do not fit.

    Args:
        shape: Shape of the model.
        memory: Memory of a GPU in bytes.
        share: Share of the memory that weights and KV cache may use.
        tensor: Tensor-parallel size of the engine.
        trainer_bytes: Bytes of each GPU that a trainer on the same GPUs occupies; 0 if there is
            none.
    """
    # If there are fewer KV heads than tensor-parallel ranks, several ranks have a copy of the same
    # KV head.
    copies = max(1, tensor // shape.kv_heads)
    free = tensor * (memory * share - trainer_bytes) - BF16 * shape.parameters
    return int(free // (shape.kv_bytes_per_token * copies))

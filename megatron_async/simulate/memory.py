"""GPU memory: KV cache of an engine; state, activations and optimizer step of a trainer rank.

Sources: mixed precision with fp32 main gradients and a distributed optimizer, 2 + 4 + 12 / DP bytes
a parameter (Megatron-core; Rajbhandari et al., arXiv 1910.02054); activations as in
`recomputation`. On a GPU, torch's Adam computes the square roots of all second moments of a group
at once (`torch.optim.adam`, `_multi_tensor_adam`); those of Apex and Transformer Engine, one kernel
each, do not.

tests/config/test_stage_memory.py compares the sum with the storages that the trainer's code makes.
"""

from dataclasses import dataclass

from megatron_async.config.model import ParallelConfig, Recompute
from megatron_async.models.shape import BF16, ModelShape
from megatron_async.simulate.recomputation import kept_bytes

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Of a parameter: bf16, fp32, and fp32 master weights with two moments of Adam."""
STEP_BYTES = 4
"""Of a parameter of the optimizer's part, while it makes its step: the root of a second moment."""
LOGIT_BYTES = 8
"""float32 logits and their gradient of the chunk whose logits exist at once."""
PAUSED_ENGINE_BYTES = 5e9
"""Memory of a paused engine on a shared GPU: CUDA context, graphs, workspaces (assumed)."""
COMMUNICATOR_BYTES = 1 << 30
"""NCCL's buffers of a group that weights come by, with NVLS."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of a trainer's GPU: always there, and in the two parts of an update beside it."""

    state: float
    activations: float
    optimizer_step: float

    @property
    def peak(self) -> float:
        """Activations are gone when the optimizer makes its step."""
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
    """Memory of a mean stage with the activations of the first; arguments as below."""
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
    """Weights, main gradients and this rank's part of the optimizer state.

    `sharded`: data-parallel ranks split the optimizer's state. `expert`: ranks that share a layer's
    experts; whole experts, over tensor and data ranks. 1 = every rank has its tensor share of them,
    which is what the planner looks for. Muon's state is counted as Adam's, which has one moment
    more.
    """
    held, stepped = _parameters(shape, layout, sharded, expert)
    return held * (WEIGHT_BYTES + GRADIENT_BYTES) + stepped * OPTIMIZER_BYTES


def offloaded_bytes(shape: ModelShape, layout: ParallelConfig, *, sharded: bool) -> float:
    """Part of `trainer_state_bytes` that is copied to host memory; gradients are freed."""
    held, stepped = _parameters(shape, layout, sharded, expert=1)
    return held * WEIGHT_BYTES + stepped * OPTIMIZER_BYTES


def _parameters(
    shape: ModelShape, layout: ParallelConfig, sharded: bool, expert: int
) -> tuple[float, float]:
    """Parameters that a rank of a mean stage holds, and those that its optimizer has."""
    experts: float = shape.mlp_parameters * shape.experts if expert > 1 else 0
    dense = (shape.parameters - experts) / (layout.tensor * layout.pipeline)
    experts /= layout.pipeline * expert
    if not sharded:
        return dense + experts, dense + experts
    replicas = layout.ranks / layout.pipeline / expert
    return dense + experts, dense / (layout.data * layout.context) + experts / replicas


def checkpoint_bytes(shape: ModelShape) -> float:
    """Bytes of one checkpoint; Muon's is counted as Adam's here too."""
    return OPTIMIZER_BYTES * shape.parameters


def activation_bytes(
    shape: ModelShape,
    layout: ParallelConfig,
    *,
    microbatch_tokens: int,
    logit_tokens: int,
    recompute: Recompute,
) -> float:
    """Return the activations of the first stage, which holds the most microbatches (1F1B)."""
    tokens = microbatch_tokens / layout.context
    per_unit = tokens * shape.hidden / layout.tensor
    in_flight = layout.pipeline
    kept, recomputed = kept_bytes(shape, shape.layers / layout.pipeline, recompute)
    held = per_unit * (in_flight * kept + recomputed)
    return held + logit_tokens * shape.vocab / layout.tensor * LOGIT_BYTES


def update_bytes(shape: ModelShape, bucket_bytes: int, stages: int) -> float:
    """Bytes on an engine's GPU beside weights and KV cache, in an update from `stages` senders.

    Two buckets are held (`weight_sync/prefetch.py`), of which one is the head where that is
    larger than a bucket. One sender alone sends the embedding first and the head last: both have
    its size. Each sender has a group of its own.
    """
    largest = max(bucket_bytes, BF16 * shape.head_parameters)
    other = largest if stages == 1 and not shape.tied else bucket_bytes
    return largest + other + stages * COMMUNICATOR_BYTES


def kv_capacity_tokens(
    shape: ModelShape, memory: float, share: float, tensor: int, taken_by_trainer: float
) -> int:
    """Tokens of KV that one engine holds; 0 or less = the weights alone do not fit.

    `taken_by_trainer` is per GPU, for engines that share their GPUs with a trainer.
    """
    # Fewer KV heads than TP ranks are replicated.
    copies = max(1, tensor // shape.kv_heads)
    left = tensor * (memory * share - taken_by_trainer) - BF16 * shape.parameters
    return int(left // (shape.kv_bytes_per_token * copies))

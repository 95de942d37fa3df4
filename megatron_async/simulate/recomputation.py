"""Estimates how much memory and time each value of `trainer.recompute` needs.

The memory is the number of bytes that a layer keeps from its forward pass to its backward pass, in
bfloat16. The layer consists of Megatron's modules, not of Transformer Engine's. The bytes are added
up operation by operation, as Korthikanti et al. (arXiv 2205.05198, section 4) do for a GPT layer:

- Both norms keep their input and output (8 bytes per token and hidden unit).
- Attention keeps its projected queries, keys and values, the rotated queries and keys, and its
  output.
- The gated feed-forward block keeps both halves of its first product and the gated result (6 bytes
  per token and unit of its width).

Time is the work of recomputation, counted in forward passes of the whole model.
"""

from megatron_async.config.model import Recompute
from megatron_async.errors import UserError
from megatron_async.models.shape import BF16, ModelShape

NORM_BYTES = 4 * BF16
"""Bytes that the two norms of a layer keep, per token and hidden unit."""
GATED_BYTES = 3 * BF16
"""Bytes that a gated feed-forward block keeps, per token and unit of its width."""
ROUTED_BYTES = 2 * BF16
"""Bytes that each expert of a token keeps of its input and output, per hidden unit."""


def attention_bytes(shape: ModelShape) -> float:
    """Return the activation bytes that both norms and the attention of one layer keep, per token
    and hidden unit."""
    queries = shape.heads * shape.head_dim / shape.hidden
    keys = shape.kv_heads * shape.head_dim / shape.hidden
    projected, rotated, output = queries + 2 * keys, queries + keys, queries
    return NORM_BYTES + BF16 * (projected + rotated + output)


def feed_forward_bytes(shape: ModelShape) -> float:
    """Return the activation bytes that the feed-forward part of one layer keeps, per token and
    hidden unit.

    This part is an MLP, or the experts to which a token is routed. An expert also keeps its input
    and its output, because they are copies of the token's hidden state.
    """
    gated = GATED_BYTES * shape.intermediate / shape.hidden
    return shape.experts_per_token * (gated + ROUTED_BYTES) if shape.experts else gated


def kept_bytes(shape: ModelShape, layers: float, recompute: Recompute) -> tuple[float, float]:
    """Return two numbers of activation bytes of a pipeline stage of `layers` layers, per token and
    hidden unit: those kept until the backward pass, and those that exist only during recomputation.

    Returns:
        Bytes kept from a microbatch's forward pass to its backward pass, and bytes that exist only
        while one layer is recomputed. If some layers keep all of their activations, the second
        number is 0. Then only the first layers of the stage are recomputed. Their backward pass
        comes last, when the other layers have freed their activations, and recomputation uses that
        memory.
    """
    attention, feed_forward = attention_bytes(shape), feed_forward_bytes(shape)
    if recompute == "none":
        return layers * (attention + feed_forward), 0.0
    if recompute == "feed_forward":
        return layers * attention, feed_forward
    if recompute == "all" or recompute >= layers:
        return layers * BF16, attention + feed_forward
    kept = layers - recompute
    return recompute * BF16 + kept * (attention + feed_forward), 0.0


def recomputed_passes(shape: ModelShape, layers: float, recompute: Recompute) -> float:
    """Return the additional work of recomputation in a pipeline stage of `layers` layers, as a
    share of one forward pass."""
    if recompute == "none":
        return 0.0
    if recompute == "feed_forward":
        active = shape.mlp_parameters * max(1, shape.experts_per_token)
        return active / shape.active_parameters
    return 1.0 if recompute == "all" else min(1.0, recompute / layers)


def check_recompute(recompute: Recompute, layers: int, stages: int) -> None:
    """Raise UserError if `trainer.recompute` is a number of layers that exceeds the layers of a
    pipeline stage.

    Args:
        recompute: Value of `trainer.recompute`.
        layers: Number of layers of each pipeline stage.
        stages: Number of pipeline stages.
    """
    if isinstance(recompute, int) and recompute > layers:
        raise UserError(
            f"trainer.recompute is {recompute}; each stage of parallel.pipeline {stages} has "
            f"{layers} layers. Set at most {layers}, or all"
        )


def by_work(shape: ModelShape, layers: int) -> list[Recompute]:
    """Return all values of `trainer.recompute` that are possible for a pipeline stage of `layers`
    layers, from the one that recomputes least to the one that recomputes most."""
    choices: list[Recompute] = ["none", "feed_forward", *range(1, layers), "all"]
    return sorted(choices, key=lambda choice: recomputed_passes(shape, layers, choice))

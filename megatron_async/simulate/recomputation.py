"""Memory and time of the choices for recomputing activations (`trainer.recompute`).

Bytes that a layer of Megatron's local kind keeps for its backward pass in bfloat16, counted from
its operations, as Korthikanti et al. do (arXiv 2205.05198, section 4) for a GPT layer: both norms
keep their input and output (8 bytes a token and hidden unit), attention its projected queries, keys
and values, the rotated queries and keys, and its output; the gated feed-forward part both halves of
its first product and the gated result (6 bytes a token and unit of its width).

Work is counted in forward passes of the whole model.
"""

from megatron_async.config.model import Recompute
from megatron_async.errors import UserError
from megatron_async.models.shape import BF16, ModelShape

NORM_BYTES = 4 * BF16
GATED_BYTES = 3 * BF16
ROUTED_BYTES = 2 * BF16


def attention_bytes(shape: ModelShape) -> float:
    """Return the bytes of both norms and the attention, for a token and hidden unit."""
    queries = shape.heads * shape.head_dim / shape.hidden
    keys = shape.kv_heads * shape.head_dim / shape.hidden
    projected, rotated, output = queries + 2 * keys, queries + keys, queries
    return NORM_BYTES + BF16 * (projected + rotated + output)


def feed_forward_bytes(shape: ModelShape) -> float:
    """Return the bytes of the MLP or of a token's experts, for a token and hidden unit.

    Each expert keeps its input and its output, too, as tokens are copied to experts.
    """
    gated = GATED_BYTES * shape.intermediate / shape.hidden
    return shape.experts_per_token * (gated + ROUTED_BYTES) if shape.experts else gated


def kept_bytes(shape: ModelShape, layers: float, recompute: Recompute) -> tuple[float, float]:
    """Return the bytes of a stage of so many layers, for a token and hidden unit.

    Returns:
        Bytes kept from a microbatch's forward pass to its backward pass, and those that exist only
        while one layer is recomputed. Where some layers keep everything, the latter fit into what
        those have released: the first layers are recomputed, and their backward pass is last.
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
    """Return the forward passes that a stage of so many layers computes again."""
    if recompute == "none":
        return 0.0
    if recompute == "feed_forward":
        active = shape.mlp_parameters * max(1, shape.experts_per_token)
        return active / shape.active_parameters
    return 1.0 if recompute == "all" else min(1.0, recompute / layers)


def check_recompute(recompute: Recompute, layers: int, stages: int) -> None:
    """Refuse more layers than a stage has. Raises UserError.

    Args:
        layers: layers of one of the `stages`.
    """
    if isinstance(recompute, int) and recompute > layers:
        raise UserError(
            f"trainer.recompute is {recompute}; each stage of parallel.pipeline {stages} has "
            f"{layers} layers. Set at most {layers}, or all"
        )


def by_work(shape: ModelShape, layers: int) -> list[Recompute]:
    """Return every setting for a stage of so many layers, the one with the least work first."""
    choices: list[Recompute] = ["none", "feed_forward", *range(1, layers), "all"]
    return sorted(choices, key=lambda choice: recomputed_passes(shape, layers, choice))

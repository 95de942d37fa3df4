"""Rotary position embeddings (RoPE) of a packed stream.

Invariants
- Frequencies are computed in float32, by the same operations in the same order as in the engines
  and the published models. Otherwise the last bit of a frequency could differ, which at position
  4,000 changes an angle by 1e-4.
- The angles of each token are computed from its own position, so no loop over sequences is needed.
- Queries and keys are rotated in float32 and rounded afterward, as SGLang does on a GPU. If sines
  and cosines were rounded to bfloat16, the error would grow with the context.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_async.models.architecture import Rope


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosine and sine of the rotary angles of each token, float32 [T, 1, head_dim / 2]."""

    cos_T1F: Tensor
    sin_T1F: Tensor

    @classmethod
    def of(cls, inv_freq_F: Tensor, position_ids_T: Tensor) -> "Rotation":
        """Compute the rotation of tokens at `position_ids_T` with the inverse frequencies
        `inv_freq_F`."""
        angles_T1F = torch.outer(position_ids_T.to(torch.float32), inv_freq_F)[:, None]
        return cls(angles_T1F.cos(), angles_T1F.sin())


@dataclass
class RotaryStream(PackedSeqParams):
    """Borders of packed sequences, together with the rotations that attention applies.

    Megatron passes this object to the core attention of every layer unchanged. `rotations` has one
    element. For a model whose sliding-window layers have a separate RoPE (Gemma 3), it has a second
    element for these layers.
    """

    rotations: tuple[Rotation, ...] = ()

    def rotation(self, *, sliding_window: bool) -> Rotation:
        """Return the rotation for a layer with or without a sliding window."""
        return self.rotations[-1 if sliding_window else 0]


def rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of elements (i, i + D / 2) of a head of width D by the token's angle i (Su
    et al., RoFormer, eq. 34).

    Returns:
        [T, heads, D] in the dtype of `x_THD`, computed in float32.
    """
    rotated_THD: Tensor = _Rotate.apply(x_THD, rotation.cos_T1F, rotation.sin_T1F)
    return rotated_THD


class _Rotate(torch.autograd.Function):
    """Autograd function of `rotate`. The backward pass rotates the gradient by the negative angles,
    so the input need not be kept."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1F, sin_T1F)
        return _rotated(x_THD, cos_T1F, sin_T1F)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None, None]:
        cos_T1F, sin_T1F = ctx.saved_tensors
        return _rotated(grad_THD, cos_T1F, -sin_T1F), None, None


def _rotated(x_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    # The products of bfloat16 and float32 values are computed in float32. `copy_` rounds the sums
    # to the type of `x_THD`.
    first, second = x_THD.chunk(2, dim=-1)
    rotated_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    into_first, into_second = rotated_THD.chunk(2, dim=-1)
    into_first.copy_(first * cos_T1F - second * sin_T1F)
    into_second.copy_(second * cos_T1F + first * sin_T1F)
    return rotated_THD


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the frequencies θ^(−2i/d) for i < d/2, where θ is `rope.theta` and d is `head_dim` (Su
    et al., RoFormer, section 3.2.2), scaled by the method `rope.kind`.

    "default" does not scale them. "linear" divides all frequencies by `rope.factor`. "llama3" and
    "yarn" divide low frequencies by `rope.factor`, leave high ones unchanged, and use a mean of
    both in between, whose weights change linearly:
    - llama3, as in Llama 3.1's released code: a frequency is low if it makes fewer than
      `rope.low_freq_factor` rotations in the original context, and high if it makes more than
      `rope.high_freq_factor`. In between, the weights are linear in the number of rotations.
    - yarn (Peng et al., arXiv 2309.00071, section 3.2): the weights are linear in the index i,
      between the frequencies that make `rope.beta_fast` and `rope.beta_slow` rotations in the
      original context.

    Returns:
        Float32 [head_dim / 2] on the CPU.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        context = rope.original_max_positions
        long = wavelengths > context / rope.low_freq_factor
        short = wavelengths < context / rope.high_freq_factor
        span = rope.high_freq_factor - rope.low_freq_factor
        share = (context / wavelengths - rope.low_freq_factor) / span
        blended = (1 - share) * frequencies / rope.factor + share * frequencies
        scaled = torch.where(long, frequencies / rope.factor, blended)
        return torch.where(short, frequencies, scaled)
    if rope.kind == "yarn":
        unscaled = 1 - _yarn_ramp(rope, head_dim)
        scaled = 1.0 / (rope.factor * rope.theta**exponent)
        return scaled * (1 - unscaled) + frequencies * unscaled
    return frequencies


def _yarn_ramp(rope: Rope, head_dim: int) -> Tensor:
    """Return YaRN's weight of the scaled frequency in the mean of scaled and unscaled frequency,
    [head_dim / 2]: 0 for high frequencies, 1 for low ones."""

    def dimension(rotations: float) -> float:
        """Return the index (not rounded) of the frequency that makes this many rotations in the
        original context."""
        wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    return ((index - low) / (high - low or 0.001)).clamp(0, 1)


def rotary_angles(inv_freq: Tensor, position_ids_T: Tensor) -> Tensor:
    """Return rotary angles in the shape that Megatron's attention expects: [T, 1, 1, head_dim],
    float32."""
    half = torch.outer(position_ids_T.to(torch.float32), inv_freq)
    return torch.cat((half, half), dim=-1)[:, None, None, :]

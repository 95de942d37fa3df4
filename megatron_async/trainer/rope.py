"""Rotary embeddings of packed sequences: one angle row per token, restarting at each sequence.

Invariants
- Frequencies are computed in float32 in the order of operations that the engines and the
  published models use: at position 4,000 one unit in the last place of a frequency is already
  an angle of 1e-4.
- Angles are gathered by each token's own position, so no loop over sequences is needed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_async.models.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """θ^(−2i/d) for i < d/2 (Su et al., RoFormer, section 3.2.2), scaled by `rope.kind`.

    Returns float32 [head_dim / 2] on the CPU. The llama3 scaling is that of Llama 3.1's released
    code: wavelengths beyond the original context are divided by `factor`, with a linear blend in
    the number of rotations between `low_freq_factor` and `high_freq_factor`.
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
    return frequencies


def rotary_angles(inv_freq: Tensor, position_ids_T: Tensor) -> Tensor:
    """Angles as Megatron's attention takes them: [T, 1, 1, head_dim], float32."""
    half = torch.outer(position_ids_T.to(torch.float32), inv_freq)
    return torch.cat((half, half), dim=-1)[:, None, None, :]

"""Converts weights to fp8 for engines with `engines.quantization: fp8`.

The format comes from DeepSeek-V3, and SGLang reads it: a matrix of fp8 numbers (float8_e4m3fn), and
a second tensor `weight_scale_inv` in float32 with one scale for each block of 128 x 128 numbers. A
weight equals its fp8 number times the scale of its block. Only linear layers are quantized.
Embedding, head, norms, biases and routers keep their precision.

Invariants
- The scale is chosen so that the largest weight of a block becomes the largest fp8 number, and each
  weight / scale is rounded to the nearest fp8 number. So the error of a weight is at most 1/16 of
  it, or scale / 1024 for weights near 0, where fp8 numbers have equal distances.
- A weight that is not finite causes an error that names its tensor.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_async.config.rollout import EngineConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.models.architecture import Architecture
from megatron_async.models.families import rules_of, stage_rules
from megatron_async.models.shards import Rule, ShardLayout

BLOCK = 128
FP8_MAX = 448.0  # Largest number of float8_e4m3fn.
SCALE_SUFFIX = "_scale_inv"
_LINEAR = {ShardLayout.ROWS, ShardLayout.COLUMNS, ShardLayout.QKV, ShardLayout.GATE_UP}


def quantize(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to fp8.

    Returns:
        The fp8 numbers [R, C], and the scales of the blocks in float32, [ceil(R / 128), ceil(C /
        128)].
    """
    rows, columns = weight_RC.shape
    padded = torch.nn.functional.pad(
        weight_RC.detach().to(torch.float32), (0, -columns % BLOCK, 0, -rows % BLOCK)
    )
    blocks_rRcC = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest_rc = blocks_rRcC.abs().amax(dim=(1, 3))
    # A block of zeros, or of weights too small for a normal float32 scale, gets the scale 1.
    scale_rc = largest_rc / FP8_MAX
    scale_rc = torch.where(scale_rc < torch.finfo(torch.float32).tiny, 1.0, scale_rc)
    # Because of rounding, the quotient may be slightly larger than the largest fp8 number.
    numbers = (blocks_rRcC / scale_rc[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    quantized = numbers.to(torch.float8_e4m3fn).view(padded.shape)[:rows, :columns]
    return quantized.contiguous(), scale_rc


def is_quantized(rule: Rule) -> bool:
    """Return whether the tensors that this rule describes are quantized, which holds for matrices
    of linear layers."""
    return rule.is_matrix and rule.layout in _LINEAR


def quantized_tensors(
    tensors: Iterator[tuple[str, Tensor]], names: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all `tensors`. A tensor whose name is in `names` is converted to fp8, and a tensor with
    its scales is yielded after it.

    Raises:
        ComponentFailure: If a tensor to be quantized is not finite; the message names it.
    """
    for name, tensor in tensors:
        if name not in names:
            yield name, tensor
            continue
        quantized, scale = quantize(tensor)
        if not bool(scale.isfinite().all()):
            raise ComponentFailure(
                f"{name} has weights that are not finite; fp8 cannot represent them"
            )
        yield name, quantized
        yield name + SCALE_SUFFIX, scale


def quantized_names(architecture: Architecture) -> frozenset[str]:
    """Return the names of the Hugging Face tensors that are converted to fp8."""
    experts = architecture.experts.num if architecture.experts else 1
    return frozenset(
        name
        for rule, layer in stage_rules(architecture)
        if is_quantized(rule)
        for expert in range(experts if rule.expert else 1)
        for name in rule.tensor_names(layer, expert)
    )


def quantization_config(architecture: Architecture) -> dict[str, Any]:
    """Return the entry `quantization_config` that config.json must have for a checkpoint of this
    model in fp8."""
    kept = [
        rule.tensors[0].removesuffix(".weight").format(layer=layer)
        for rule, layer in stage_rules(architecture)
        if rule.is_matrix and rule.layout is ShardLayout.REPLICATED
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *kept],
    }


def check_fp8(architecture: Architecture, engines: EngineConfig, device: str) -> None:
    """Check that engines can run a model in fp8.

    Raises:
        UserError: If the engines run on CPUs, or a matrix cannot be divided into blocks for each
            GPU.
    """
    if device == "cpu":
        raise UserError(
            "engines.quantization is fp8 and engines.device is cpu; SGLang's fp8 layers do not run "
            "on this kind of CPU. Use GPU engines, or no quantization."
        )
    for rule in rules_of(architecture):
        if not is_quantized(rule):
            continue
        for name, shape in zip(rule.tensors, rule.shapes, strict=True):
            dim = 1 if rule.layout is ShardLayout.COLUMNS else 0
            if shape[dim] % (BLOCK * engines.tensor):
                raise UserError(
                    f"engines.quantization is fp8 and {name} has {shape[dim]} "
                    f"{'columns' if dim else 'rows'}; engines.tensor {engines.tensor} does not "
                    f"divide them into blocks of {BLOCK}"
                )

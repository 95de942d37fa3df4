"""Defines the specialization of the loss kernels: one frozen object per (config, present streams).

Thresholds are compile-time constants: they do not change within a run, and a kernel without its
unused branches reads and computes less. Sizes and denominators stay runtime arguments.

Invariants
- `AT` is the only place that defines the order of partial sums.
- A sequence's slots are contiguous: block p of CHUNK tokens writes its partial results of sequence
  s to slot p + s, and both p and s only grow along the stream.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from megatron_async_kernels.loss_types import SUM_NAMES, LossConfig, LossInputs

MAX_RULES = 4
CHUNK = 4096
# Row of partial results: sums in the order of SUM_NAMES, and the count of non-finite tokens. From
# LAG_OFFSET on, the four sums of LAG_SUM_NAMES follow, each with LAG_STRIDE bins, one for each lag
# (age of a token in policy versions).
Columns = namedtuple("Columns", (*SUM_NAMES, "nonfinite"))  # type: ignore[misc]
AT: Any = Columns(*range(len(SUM_NAMES) + 1))
LAG_OFFSET = 32
LAG_STRIDE = 16
ROW_WIDTH = LAG_OFFSET + 4 * LAG_STRIDE
MAX_WIDTH = 8
# Partial results that a block of tokens contributes to a sequence: trained tokens, Σ L, tokens kept
# by token rules, Σ l over trained tokens, Σ l over kept tokens, then one statistic per rule.
NUM_SLOT_COLUMNS = 5 + MAX_RULES
# Values of a sequence that its tokens read in the second pass: kept by the sequence rules (0/1),
# 1 / kept tokens, Σ l over trained tokens, mean l over kept tokens.
NUM_SEQUENCE_VALUES = 4


@dataclass(frozen=True)
class LossSpec:
    """Compile-time constants of the loss kernels.

    Attributes:
        config: Thresholds and choices of the loss.
        num_rules: Number of rejection rules.
        two_pass: Whether a token's loss depends on its whole sequence, so that two passes are
            needed.
        has_correction: Whether there are weights of decoupled correction.
        has_reference: Whether there are log-probs of the reference policy.
        has_entropy: Whether there are entropies.
        has_lag: Whether there are lags.
        at: Position of each partial sum in a row of partial results.
    """

    config: LossConfig
    num_rules: int
    two_pass: bool
    has_correction: bool
    has_reference: bool
    has_entropy: bool
    has_lag: bool
    at: Any = AT


def needs_sequences(config: LossConfig) -> bool:
    """Return whether a token's loss depends on its whole sequence, so that the kernels need two
    passes."""
    return (
        config.aggregation == "seq_mean_token_mean"
        or config.surrogate == "gspo"
        or (config.surrogate == "reinforce" and config.weight_level == "sequence")
        or any(rule.level != "token" for rule in config.rejection)
    )


def loss_spec(inputs: LossInputs, config: LossConfig) -> LossSpec:
    """Return the compile-time constants of the loss kernels for these inputs and this config.

    Raises:
        ValueError: There are more than `MAX_RULES` rejection rules.
    """
    if len(config.rejection) > MAX_RULES:
        raise ValueError(f"at most {MAX_RULES} rejection rules, got {len(config.rejection)}")
    return LossSpec(
        config=config,
        num_rules=len(config.rejection),
        two_pass=needs_sequences(config),
        has_correction=inputs.is_weights_T is not None,
        has_reference=inputs.ref_logprobs_T is not None,
        has_entropy=inputs.entropy_T is not None,
        has_lag=inputs.lag_T is not None,
    )

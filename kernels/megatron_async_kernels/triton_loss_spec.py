"""Defines `LossSpec`, the compile-time constants of the loss kernels. Triton compiles a variant of
a kernel for each combination of loss settings and existing inputs.

Thresholds are compile-time constants, because they do not change within a run, and a kernel without
unused branches reads and computes less. Sizes and denominators are arguments of the kernels.

Invariants
- `AT` is the only place that defines the order of partial sums.
- A slot has the partial sums of one sequence in one block of CHUNK tokens. Block p writes those of
  sequence s to slot p + s. From one (block, sequence) pair to the next, p, s or both grow, so each
  pair has a separate slot, and the slots of a sequence are adjacent.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from megatron_async_kernels.loss_types import SUM_NAMES, LossConfig, LossInputs

MAX_RULES = 4
CHUNK = 4096
# Positions in a row of partial results: first the sums in the order of SUM_NAMES, then the number
# of non-finite tokens. From LAG_OFFSET on, the four sums of LAG_SUM_NAMES follow, each with
# LAG_STRIDE bins, one for each lag (age of a token in policy versions).
Columns = namedtuple("Columns", (*SUM_NAMES, "nonfinite"))  # type: ignore[misc]
AT: Any = Columns(*range(len(SUM_NAMES) + 1))
LAG_OFFSET = 32
LAG_STRIDE = 16
ROW_WIDTH = LAG_OFFSET + 4 * LAG_STRIDE
MAX_WIDTH = 8
# Number of columns of a slot, the partial sums of a sequence in one block of tokens: trained
# tokens, sum of L, tokens kept by token rules, sum of l over trained tokens, sum of l over kept
# tokens, and one statistic for each rejection rule. L is the log-ratio to the policy that generated
# the token, and l the log-ratio in the loss.
NUM_SLOT_COLUMNS = 5 + MAX_RULES
# Number of values of a sequence that its tokens read in the second pass: whether the sequence rules
# keep it (0 or 1), 1 / number of kept tokens, sum of l over trained tokens, and mean of l over kept
# tokens, where l is the log-ratio in the loss.
NUM_SEQUENCE_VALUES = 4


@dataclass(frozen=True)
class LossSpec:
    """Compile-time constants of the loss kernels.

    Attributes:
        config: Thresholds and choices of the loss.
        num_rules: Number of rejection rules.
        two_pass: Whether a token's loss depends on its whole sequence, so that two passes are
            needed.
        has_correction: Whether there are importance weights (`is_weights_T`).
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
    """Return the compile-time constants of the loss kernels for these loss settings and for those
    inputs that are not None.

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

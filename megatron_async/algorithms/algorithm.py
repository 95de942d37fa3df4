"""`Algorithm`: the one seam between the trainer and advantages, correction and losses.

How a trainer uses it, once per batch:

    algorithm = build_algorithm(config)
    if algorithm.needs_old_logprobs: fill batch.old_logprobs_T with a no-gradient pass
    if algorithm.needs_ref_logprobs: fill batch.ref_logprobs_T likewise
    batch, metrics = algorithm.prepare(batch)
    for minibatch in batch.minibatches(updates_per_batch):          # x config.algorithm.epochs
        logprobs_T = a no-gradient pass if algorithm.needs_minibatch_pass else None
        minibatch, denominators = algorithm.prepare_minibatch(minibatch, logprobs_T)
        for microbatch in minibatch:                                # whole sequences
            output = algorithm.loss(algorithm.inputs(microbatch, logprobs_T, ...), denominators)
            backward from output.dlogp_T; total = total.merge(output.metrics)
        metrics |= finalize(total)

Invariants
- Batches are never modified: each step returns a new one.
- A batch holds all its sequences on every rank, so every number is global and needs no collective.
  A loss is the same for any split of them into microbatches.
- Minibatches hold whole groups (RAPID's baseline and denominators need them).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron_async_kernels import is_loss, policy_loss
from megatron_async_kernels.backend import Backend
from megatron_async_kernels.loss_torch import generation_log_weight, raw_weights
from megatron_async_kernels.loss_types import Denominators, LossInputs, LossOutput, check_finite
from megatron_async_kernels.packed import segment_sum, spread
from megatron_async_kernels.surrogates import truncate

from megatron_async.algorithms import advantages
from megatron_async.algorithms.correction import correct, weight_mean
from megatron_async.algorithms.loss_settings import loss_config
from megatron_async.algorithms.metrics import batch_staleness
from megatron_async.algorithms.own_loss import own_loss
from megatron_async.algorithms.transfer import to_device
from megatron_async.config import RunConfig
from megatron_async.config.algorithm import AlgorithmConfig
from megatron_async.config.recipes import recipe_defaults
from megatron_async.trajectory.batch import TokenBatch

FloatVector = npt.NDArray[np.floating]
IndexVector = npt.NDArray[np.integer]


def build_algorithm(config: RunConfig, device: torch.device | str = "cpu") -> Algorithm:
    """The algorithm of a run; statistics are computed on `device` (that of the process group)."""
    limit = config.algorithm.overlong.max_length or config.sampling.max_new_tokens
    return Algorithm(config.algorithm, max_response_length=limit, device=device)


def build_sft_algorithm(device: torch.device | str = "cpu") -> Algorithm:
    """Masked cross-entropy averaged over all trained tokens, whatever the run's own recipe is."""
    settings = recipe_defaults("sft")["algorithm"]
    config = AlgorithmConfig.model_validate(settings)
    return Algorithm(config, max_response_length=1, device=device)


class Algorithm:
    """Settings and nothing else; all methods are pure."""

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        max_response_length: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.loss_config = loss_config(config)
        self._own_loss = own_loss(config)
        self.device = torch.device(device)
        self._max_response_length = max_response_length

    @property
    def needs_old_logprobs(self) -> bool:
        """Return whether pi_old is recomputed at the start of the update (decoupled mode)."""
        return self.loss_config.ratio_to == "old"

    @property
    def needs_ref_logprobs(self) -> bool:
        """Return whether a frozen reference policy is evaluated."""
        return self.config.kl.loss_coef > 0 or self.config.kl.reward_coef > 0

    @property
    def needs_minibatch_pass(self) -> bool:
        """Return whether each update starts with a no-gradient pass over its whole minibatch."""
        return self.config.advantage.estimator == "rapid" or self._normalizes_in_loss

    @property
    def _normalizes_in_loss(self) -> bool:
        correction = self.config.correction
        return (
            correction.bypass_mode
            and correction.rollout_is is not None
            and correction.rollout_is_batch_normalize
        )

    def prepare(self, batch: TokenBatch) -> tuple[TokenBatch, dict[str, float]]:
        """Advantages (RAPID's excepted), weights and mask of decoupled correction, metrics.

        Raises NonFiniteError naming the array, ValueError when log-probs are missing.
        """
        metrics = batch_staleness(
            self._tensor(batch.lag_T),
            self._tensor(batch.loss_mask_T),
            self._tensor(batch.resumed_S),
        )
        corrected = batch
        if self.needs_old_logprobs:
            corrected, found = self._decoupled(batch)
            metrics |= found
        rewards_S, groups_S = self._rewards(batch), self._groups(batch)
        if batch.num_sequences:
            metrics |= _reward_metrics(rewards_S, groups_S)
        if self.config.advantage.estimator == "rapid":
            return corrected, metrics
        tokens_S = segment_sum(self._tensor(corrected.loss_mask_T), self._cu_seqlens(batch))
        advantages_S = self._advantages(rewards_S, groups_S, tokens_S)
        return self._with_advantages(corrected, advantages_S), metrics

    def prepare_minibatch(
        self, batch: TokenBatch, logprobs_T: FloatVector | torch.Tensor | None = None
    ) -> tuple[TokenBatch, Denominators]:
        """Return the batch and denominators that a step shares; some depend on the current policy.

        `logprobs_T` are those of the no-gradient pass, needed when `needs_minibatch_pass`.
        """
        mask_T, cu_S1 = self._tensor(batch.loss_mask_T), self._cu_seqlens(batch)
        sequences = (segment_sum(mask_T, cu_S1) > 0).sum()
        denominators = Denominators(float((mask_T != 0).sum()), float(sequences))
        if not self.needs_minibatch_pass:
            return batch, denominators
        if logprobs_T is None:
            raise ValueError("this algorithm needs the log-probs of a no-gradient pass, got None")
        current_T = self._tensor(logprobs_T)
        anchor_T = self._anchor(batch)
        check_finite({"logprobs": current_T, "anchor_logprobs": anchor_T}, mask_T)
        log_ratio_T = current_T - anchor_T
        if self._normalizes_in_loss:
            mean = self._weight_mean(log_ratio_T, mask_T, cu_S1)
            denominators = replace(denominators, weight_mean=mean)
        if self.config.advantage.estimator == "rapid":
            log_weight_S = generation_log_weight(log_ratio_T, mask_T, cu_S1)
            rapid = self.config.rapid
            advantages_S = advantages.rapid_advantages(
                self._rewards(batch),
                log_weight_S,
                self._groups(batch),
                eta=rapid.eta,
                leave_one_out=rapid.leave_one_out,
            )
            batch = self._with_advantages(batch, advantages_S)
        return batch, denominators

    def inputs(
        self,
        batch: TokenBatch,
        logprobs_T: torch.Tensor,
        entropy_T: torch.Tensor | None = None,
        *,
        rows_R: IndexVector | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> LossInputs:
        """A prepared (micro)batch and the current log-probs as the loss reads them.

        With `rows_R` only these tokens of the batch, which `logprobs_T` and `entropy_T` are of;
        `cu_seqlens` are the borders of sequences among them. Arrays go to the device of
        `logprobs_T`. For SFT the rollout policy is the current one.
        """
        device, dtype = logprobs_T.device, logprobs_T.dtype

        def taken(array_T: npt.NDArray[Any]) -> torch.Tensor:
            return to_device(array_T if rows_R is None else array_T[rows_R], device)

        def read(array_T: FloatVector | None) -> torch.Tensor | None:
            return None if array_T is None else taken(array_T).to(dtype)

        if batch.advantages_T is None:
            raise ValueError("the batch has no advantages; call prepare (and prepare_minibatch)")
        current_T = logprobs_T.detach()
        is_sft = self.loss_config.surrogate == "sft"
        return LossInputs(
            logprobs_T=current_T,
            rollout_logprobs_T=current_T if is_sft else read(batch.rollout_logprobs_T),  # type: ignore[arg-type]
            advantages_T=read(batch.advantages_T),  # type: ignore[arg-type]
            mask_T=read(batch.loss_mask_T),  # type: ignore[arg-type]
            cu_seqlens_S1=to_device(
                batch.cu_seqlens_S1 if cu_seqlens is None else cu_seqlens, device
            ),
            old_logprobs_T=read(batch.old_logprobs_T),
            ref_logprobs_T=read(batch.ref_logprobs_T),
            entropy_T=None if entropy_T is None else entropy_T.detach(),
            is_weights_T=read(batch.is_weights_T),
            lag_T=taken(batch.lag_T),
        )

    def loss(
        self,
        inputs: LossInputs,
        denominators: Denominators,
        *,
        backend: Backend = "auto",
        check: bool = True,
    ) -> LossOutput:
        """The loss of one microbatch; `backend` and `check` as in `is_loss`."""
        asked = (inputs, self.loss_config, denominators)
        if self._own_loss is not None:
            return policy_loss(*asked, own=self._own_loss, check=check)
        return is_loss(*asked, backend=backend, check=check)

    def correction_metrics(
        self, batch: TokenBatch, logprobs_T: FloatVector | torch.Tensor
    ) -> dict[str, float]:
        """`rollout_corr/` of a minibatch in bypass mode, from the log-probs its loss saw.

        In decoupled mode `prepare` reports them. Empty for SFT and for a minibatch without any
        trained token.
        """
        mask_T = self._tensor(batch.loss_mask_T)
        if not self.config.correction.bypass_mode or self.loss_config.surrogate == "sft":
            return {}
        if not mask_T.any():
            return {}
        level, threshold = self._reported_weights()
        reported = self.config.correction.model_copy(
            update={
                "rollout_is": level,
                "rollout_is_threshold": threshold,
                "rollout_is_batch_normalize": self._normalizes_in_loss,
            }
        )
        rollout_T = self._tensor(batch.rollout_logprobs_T)
        current_T = self._tensor(logprobs_T)
        return correct(reported, current_T, rollout_T, mask_T, self._cu_seqlens(batch))[2]

    def log_weights(self, batch: TokenBatch, logprobs_T: FloatVector) -> FloatVector:
        """log w of every trained token of a minibatch, from the log-probs its loss saw.

        w is the raw weight to the policy that wrote the token. Empty for SFT, which has none.
        """
        if self.loss_config.surrogate == "sft":
            return np.empty(0, np.float32)
        trained = batch.loss_mask_T != 0
        return logprobs_T[trained] - batch.rollout_logprobs_T[trained]

    def _reported_weights(self) -> tuple[str | None, float | str]:
        correction, config = self.config.correction, self.loss_config
        if correction.rollout_is is not None:
            return correction.rollout_is, correction.rollout_is_threshold
        if config.weight_level != "none" and config.weight_upper is not None:
            lower, upper = config.weight_lower, config.weight_upper
            return config.weight_level, upper if lower is None else f"{lower}_{upper}"
        if config.surrogate == "aipo":
            return "token", config.aipo_delta
        return None, correction.rollout_is_threshold

    def _decoupled(self, batch: TokenBatch) -> tuple[TokenBatch, dict[str, float]]:
        if batch.old_logprobs_T is None:
            raise ValueError("decoupled correction needs old_logprobs_T, got None")
        mask_T = self._tensor(batch.loss_mask_T)
        if not mask_T.any():
            return batch, {}
        weights_T, kept_T, metrics = correct(
            self.config.correction,
            self._tensor(batch.old_logprobs_T),
            self._tensor(batch.rollout_logprobs_T),
            mask_T,
            self._cu_seqlens(batch),
        )
        mask_array = kept_T.cpu().numpy().astype(batch.loss_mask_T.dtype)
        weights_array = None if weights_T is None else weights_T.cpu().numpy()
        return replace(batch, loss_mask_T=mask_array, is_weights_T=weights_array), metrics

    def _rewards(self, batch: TokenBatch) -> torch.Tensor:
        """Rewards with length shaping and the reference KL taken off, float64 [S]."""
        rewards_S = self._tensor(batch.rewards_S)
        check_finite({"rewards": rewards_S}, torch.ones_like(rewards_S))
        overlong, cu_S1 = self.config.overlong, self._cu_seqlens(batch)
        if overlong.buffer_share > 0:
            response_S = cu_S1.diff() - self._tensor(batch.prompt_lengths_S)
            rewards_S = rewards_S + advantages.overlong_penalty(
                response_S,
                max_length=self._max_response_length,
                buffer=overlong.buffer_share * self._max_response_length,
                penalty=overlong.penalty,
            )
        if self.config.kl.reward_coef > 0:
            if batch.ref_logprobs_T is None:
                raise ValueError("kl.reward_coef needs ref_logprobs_T, got None")
            mask_T, anchor_T = self._tensor(batch.loss_mask_T), self._anchor(batch)
            reference_T = self._tensor(batch.ref_logprobs_T)
            check_finite({"ref_logprobs": reference_T, "anchor_logprobs": anchor_T}, mask_T)
            distance_S = generation_log_weight(anchor_T - reference_T, mask_T, cu_S1)
            rewards_S = rewards_S - self.config.kl.reward_coef * distance_S
        return rewards_S

    def _groups(self, batch: TokenBatch) -> torch.Tensor:
        """Return the index of each sequence's group, [S]."""
        return torch.unique(self._tensor(batch.group_ids_S), return_inverse=True)[1]

    def _advantages(
        self, rewards_S: torch.Tensor, groups_S: torch.Tensor, tokens_S: torch.Tensor
    ) -> torch.Tensor:
        settings = self.config.advantage
        if settings.estimator in ("grpo", "dr_grpo"):
            return advantages.group_advantages(
                rewards_S,
                groups_S,
                normalize_std=settings.estimator == "grpo",
                epsilon=settings.std_epsilon,
            )
        if settings.estimator == "rloo":
            return advantages.leave_one_out_advantages(rewards_S, groups_S)
        if settings.estimator == "reinforce_pp":
            return advantages.whitened_advantages(rewards_S, tokens_S)
        if settings.estimator == "pg":
            return advantages.batch_baseline_advantages(rewards_S)
        return torch.ones_like(rewards_S)

    def _weight_mean(
        self, log_ratio_T: torch.Tensor, mask_T: torch.Tensor, cu_S1: torch.Tensor
    ) -> float:
        config = self.loss_config
        raw_T = raw_weights(log_ratio_T, mask_T, cu_S1, config.weight_level)
        weights_T, _, _ = truncate(raw_T, config.weight_lower, config.weight_upper)
        return weight_mean(weights_T, mask_T, cu_S1, config.weight_level)

    def _with_advantages(self, batch: TokenBatch, advantages_S: torch.Tensor) -> TokenBatch:
        advantages_T = spread(advantages_S, self._cu_seqlens(batch)).cpu().numpy()
        return replace(batch, advantages_T=advantages_T)

    def _anchor(self, batch: TokenBatch) -> torch.Tensor:
        if not self.needs_old_logprobs:
            return self._tensor(batch.rollout_logprobs_T)
        if batch.old_logprobs_T is None:
            raise ValueError("decoupled mode needs old_logprobs_T, got None")
        return self._tensor(batch.old_logprobs_T)

    def _tensor(self, array: FloatVector | torch.Tensor) -> torch.Tensor:
        return to_device(array, self.device).to(torch.float64)

    def _cu_seqlens(self, batch: TokenBatch) -> torch.Tensor:
        return to_device(batch.cu_seqlens_S1, self.device).to(torch.int64)


def _reward_metrics(rewards_S: torch.Tensor, groups_S: torch.Tensor) -> dict[str, float]:
    informative_G = advantages.informative_groups(rewards_S, groups_S)
    return {
        "reward/mean": float(rewards_S.mean()),
        "reward/std": float(rewards_S.std(correction=0)),
        "reward/min": float(rewards_S.min()),
        "reward/max": float(rewards_S.max()),
        "reward/uninformative_groups": 1.0 - float(informative_G.double().mean()),
    }

"""Provides `Algorithm`, the only interface of the trainer to advantages, correction and losses.

A trainer uses it once per batch as follows:

    algorithm = build_algorithm(config)
    batch = DeviceBatch.of(token_batch, device)
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
- Batches are never modified; each step returns a new one.
- Every rank has all sequences of a batch, so statistics over the batch need no communication. The
  total loss is the same for every division of the sequences into microbatches.
- Minibatches consist of whole groups, because RAPID's baseline is computed over the group within a
  minibatch.
- An episode counts once in every baseline and standard deviation, however many branches and turns
  it has. An array `x_E` has one entry for each episode (or trajectory without turns), and `x_S` one
  for each sequence.
- Statistics are computed in float64, losses in the type of the log-probs.
"""

from dataclasses import replace

import torch
from megatron_async_kernels import is_loss, policy_loss
from megatron_async_kernels.backend import Backend
from megatron_async_kernels.loss_torch import generation_log_weight, raw_weights
from megatron_async_kernels.loss_types import Denominators, LossInputs, LossOutput, check_finite
from megatron_async_kernels.packed import spread
from megatron_async_kernels.surrogates import truncate
from torch import Tensor

from megatron_async.algorithms import advantages
from megatron_async.algorithms.correction import correct, weight_mean
from megatron_async.algorithms.device_batch import DeviceBatch
from megatron_async.algorithms.loss_settings import loss_config
from megatron_async.algorithms.metrics import lag_shares, reward_metrics
from megatron_async.algorithms.own_loss import own_loss
from megatron_async.config import RunConfig
from megatron_async.config.algorithm import AlgorithmConfig
from megatron_async.config.recipes import recipe_defaults
from megatron_async.trajectory.packing import TURN_RETURNS


def build_algorithm(config: RunConfig) -> "Algorithm":
    """Create the algorithm of a run from its settings."""
    return Algorithm(config.algorithm, max_response_length=config.sampling.max_new_tokens)


def build_sft_algorithm() -> "Algorithm":
    """Create the algorithm of supervised fine-tuning: cross-entropy, averaged over the trained
    tokens.

    It does not depend on the run's `algorithm` settings.
    """
    settings = recipe_defaults("sft")["algorithm"]
    return Algorithm(AlgorithmConfig.model_validate(settings), max_response_length=1)


class Algorithm:
    """Computes advantages, rollout corrections and losses according to a run's `algorithm`
    settings. All methods are pure."""

    def __init__(self, config: AlgorithmConfig, *, max_response_length: int) -> None:
        self.config = config
        self.loss_config = loss_config(config)
        self._own_loss = own_loss(config)
        self._max_response_length = max_response_length

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the trainer must compute the log-probs of pi_old, the policy before the update,
        at the start of the update (decoupled mode)."""
        return self.loss_config.ratio_to == "old"

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether the trainer must compute log-probs of the frozen reference policy."""
        return self.config.kl.loss_coef > 0 or self.config.kl.reward_coef > 0

    @property
    def needs_minibatch_pass(self) -> bool:
        """Whether each optimizer step must start with a pass without gradient over its whole
        minibatch."""
        return self.config.advantage.estimator == "rapid" or self._normalizes_in_loss

    @property
    def _normalizes_in_loss(self) -> bool:
        correction = self.config.correction
        return (
            correction.bypass_mode
            and correction.rollout_is is not None
            and correction.rollout_is_batch_normalize
        )

    @property
    def _is_sft(self) -> bool:
        return self.loss_config.surrogate == "sft"

    def prepare(self, batch: DeviceBatch) -> tuple[DeviceBatch, dict[str, float]]:
        """Compute the fields of a batch that do not depend on the current policy.

        These are the shaped rewards, the advantages and, in decoupled mode (`needs_old_logprobs`),
        the importance weights and the loss mask without rejected tokens. RAPID's advantages depend
        on the current policy, so `prepare_minibatch` computes them.

        Returns:
            The batch with these fields, and metrics.

        Raises:
            NonFiniteError: If an array has non-finite values; the message names the array.
        """
        first_E, index_S = batch.episodes
        groups_E = batch.group_index_S[first_E]
        metrics = lag_shares(batch.lag_T, batch.loss_mask_T)
        # Compute the rewards before rejection changes the loss mask, because the KL to the
        # reference counts all tokens.
        rewards_E = self._rewards(batch)
        batch = replace(batch, shaped_rewards_S=rewards_E[index_S])
        if self.needs_old_logprobs:
            batch, found = self._decoupled(batch)
            metrics |= found
        metrics |= reward_metrics(rewards_E, groups_E)
        if self.config.advantage.estimator != "rapid":
            trained_E = _of_episodes(batch.trained_S, batch)
            advantages_E, scale_E = self._advantages(rewards_E, groups_E, trained_E)
            batch = _with_advantages(batch, advantages_E[index_S], scale_E[index_S])
        return batch, metrics

    def prepare_minibatch(
        self, batch: DeviceBatch, logprobs_T: Tensor | None = None
    ) -> tuple[DeviceBatch, Denominators]:
        """Compute the values that all microbatches of one optimizer step share: the denominators of
        the loss, and for RAPID the advantages.

        Args:
            batch: The minibatch.
            logprobs_T: Log-probs of the current policy from the pass without gradient; required if
                `needs_minibatch_pass`.

        Returns:
            The minibatch, for RAPID with its advantages, and the denominators of the loss.
        """
        tokens, sequences = (batch.loss_mask_T != 0).sum(), (batch.trained_S > 0).sum()
        denominators = Denominators(float(tokens), float(sequences))
        if not self.needs_minibatch_pass:
            return batch, denominators
        assert logprobs_T is not None
        mask_T, cu_S1 = batch.loss_mask_T.double(), batch.cu_seqlens_S1
        current_T, anchor_T = logprobs_T.double(), self._anchor(batch)
        check_finite({"logprobs": current_T, "anchor_logprobs": anchor_T}, mask_T)
        log_ratio_T = current_T - anchor_T
        if self._normalizes_in_loss:
            used = self.loss_config
            raw_T = raw_weights(log_ratio_T, mask_T, cu_S1, used.weight_level)
            weights_T, _, _ = truncate(raw_T, used.weight_lower, used.weight_upper)
            mean = weight_mean(weights_T, mask_T, cu_S1, used.weight_level)
            denominators = replace(denominators, weight_mean=mean)
        if self.config.advantage.estimator == "rapid":
            rapid = self.config.rapid
            assert batch.shaped_rewards_S is not None
            advantages_S = advantages.rapid_advantages(
                batch.shaped_rewards_S,
                generation_log_weight(log_ratio_T, mask_T, cu_S1),
                batch.group_index_S,
                eta=rapid.eta,
                leave_one_out=rapid.leave_one_out,
            )
            batch = _with_advantages(batch, advantages_S, torch.ones_like(advantages_S))
        return batch, denominators

    def inputs(
        self, batch: DeviceBatch, logprobs_T: Tensor, entropy_T: Tensor | None = None
    ) -> LossInputs:
        """Return the inputs of the loss for a prepared (micro)batch and its current log-probs.

        For SFT there is no rollout policy, so the current log-probs are used as its log-probs.
        """

        def read(values_T: Tensor) -> Tensor:
            return values_T.detach().to(logprobs_T.dtype)

        def read_if_any(values_T: Tensor | None) -> Tensor | None:
            return None if values_T is None else read(values_T)

        assert batch.advantages_T is not None
        return LossInputs(
            logprobs_T=read(logprobs_T),
            rollout_logprobs_T=read(logprobs_T if self._is_sft else batch.rollout_logprobs_T),
            advantages_T=read(batch.advantages_T),
            mask_T=read(batch.loss_mask_T),
            cu_seqlens_S1=batch.cu_seqlens_S1,
            old_logprobs_T=read_if_any(batch.old_logprobs_T),
            ref_logprobs_T=read_if_any(batch.ref_logprobs_T),
            entropy_T=read_if_any(entropy_T),
            is_weights_T=read_if_any(batch.is_weights_T),
            lag_T=batch.lag_T,
            columns=batch.columns,
        )

    def loss(
        self,
        inputs: LossInputs,
        denominators: Denominators,
        *,
        backend: Backend = "auto",
        check: bool = True,
    ) -> LossOutput:
        """Return the loss of a microbatch: the sum over its tokens of a * (l + kl_coef * q -
        entropy_coef * H), with the token's aggregation weight a, policy loss l, KL estimate q and
        entropy H.

        The aggregation weights determine whether the loss is a mean over tokens or over sequences,
        for instance; see `LossConfig`.

        Args:
            inputs: The microbatch, as `inputs` returns it.
            denominators: The denominators that `prepare_minibatch` returns.
            backend: Implementation of the loss, as in `is_loss`.
            check: Whether the inputs are checked for non-finite values, as in `is_loss`.
        """
        asked = (inputs, self.loss_config, denominators)
        if self._own_loss is not None:
            return policy_loss(*asked, own=self._own_loss, check=check)
        return is_loss(*asked, backend=backend, check=check)

    def correction_metrics(self, batch: DeviceBatch, logprobs_T: Tensor) -> dict[str, float]:
        """Return the `rollout_corr/` metrics of a minibatch in bypass mode. `logprobs_T` are the
        current policy's log-probs with which the loss of the minibatch was computed.

        In decoupled mode `prepare` returns them. The result is empty for SFT and for a minibatch
        without trained tokens.
        """
        bypass = self.config.correction.bypass_mode and not self._is_sft
        if not bypass or not batch.loss_mask_T.any():
            return {}
        level, threshold = self._reported_weights()
        reported = self.config.correction.model_copy(
            update={
                "rollout_is": level,
                "rollout_is_threshold": threshold,
                "rollout_is_batch_normalize": self._normalizes_in_loss,
            }
        )
        return correct(reported, batch, logprobs_T)[2]

    def log_weights(self, batch: DeviceBatch, logprobs_T: Tensor) -> Tensor:
        """Return log w for every trained token of a minibatch, where w is the token's probability
        under the current policy, divided by its probability under the policy that generated it.

        `logprobs_T` are the current policy's log-probs with which the loss of the minibatch was
        computed. The result is empty for SFT.
        """
        counted_T = (batch.loss_mask_T != 0) & (not self._is_sft)
        return (logprobs_T - batch.rollout_logprobs_T)[counted_T]

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

    def _decoupled(self, batch: DeviceBatch) -> tuple[DeviceBatch, dict[str, float]]:
        assert batch.old_logprobs_T is not None
        if not batch.loss_mask_T.any():
            return batch, {}
        weights_T, kept_T, metrics = correct(self.config.correction, batch, batch.old_logprobs_T)
        return replace(batch, loss_mask_T=kept_T, is_weights_T=weights_T), metrics

    def _rewards(self, batch: DeviceBatch) -> Tensor:
        """Return the reward of each episode plus the penalty for its length and minus the KL to the
        reference policy, float64 [E]."""
        first_E, cu_S1 = batch.episodes[0], batch.cu_seqlens_S1
        rewards_E = batch.rewards_S.double()[first_E]
        check_finite({"rewards": rewards_E}, torch.ones_like(rewards_E))
        overlong = self.config.overlong
        if overlong.buffer_share > 0:
            rewards_E = rewards_E + advantages.overlong_penalty(
                (cu_S1.diff() - batch.prompt_lengths_S)[first_E],
                max_length=self._max_response_length,
                buffer=overlong.buffer_share * self._max_response_length,
                penalty=overlong.penalty,
            )
        if self.config.kl.reward_coef > 0:
            assert batch.ref_logprobs_T is not None
            mask_T, anchor_T = batch.loss_mask_T.double(), self._anchor(batch)
            reference_T = batch.ref_logprobs_T.double()
            check_finite({"ref_logprobs": reference_T, "anchor_logprobs": anchor_T}, mask_T)
            distance_S = generation_log_weight(anchor_T - reference_T, mask_T, cu_S1)
            rewards_E = rewards_E - self.config.kl.reward_coef * _of_episodes(distance_S, batch)
        return rewards_E

    def _advantages(
        self, rewards_E: Tensor, groups_E: Tensor, trained_E: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the advantage of each episode, and its derivative with respect to the reward, both
        [E].

        The derivative treats means and standard deviations of rewards as constants.
        """
        ones_E = torch.ones_like(rewards_E)
        match self.config.advantage.estimator:
            case "grpo":
                return advantages.group_advantages(rewards_E, groups_E)
            case "dr_grpo":
                return advantages.group_advantages(rewards_E, groups_E, normalize_std=False)
            case "rloo":
                return advantages.leave_one_out_advantages(rewards_E, groups_E), ones_E
            case "reinforce_pp":
                return advantages.whitened_advantages(rewards_E, trained_E)
            case "pg":
                return advantages.batch_baseline_advantages(rewards_E), ones_E
        return ones_E, torch.zeros_like(rewards_E)

    def _anchor(self, batch: DeviceBatch) -> Tensor:
        """Return the log-probs of the policy in the denominator of the probability ratio, float64
        [T]: those of pi_old in decoupled mode, otherwise those of the rollout policy."""
        if not self.needs_old_logprobs:
            return batch.rollout_logprobs_T.double()
        assert batch.old_logprobs_T is not None
        return batch.old_logprobs_T.double()


def _with_advantages(batch: DeviceBatch, advantages_S: Tensor, scale_S: Tensor) -> DeviceBatch:
    """Return the batch with the advantage of each token: the advantage of its sequence, plus
    `scale_S` times the difference between the return of its turn and the reward of its sequence.

    Without returns of turns, the difference is 0.
    """
    cu_S1, returns_T = batch.cu_seqlens_S1, batch.columns.get(TURN_RETURNS)
    advantages_T = spread(advantages_S, cu_S1)
    if returns_T is not None:
        more_T = returns_T.double() - spread(batch.rewards_S.double(), cu_S1)
        more_T = more_T * spread(scale_S, cu_S1)
        advantages_T = advantages_T + more_T * (batch.loss_mask_T != 0)
    return replace(batch, advantages_T=advantages_T)


def _of_episodes(values_S: Tensor, batch: DeviceBatch) -> Tensor:
    """Return the sum of `values_S` over the sequences of each episode, [E]."""
    first_E, index_S = batch.episodes
    return values_S.new_zeros(len(first_E)).index_add(0, index_S, values_S)

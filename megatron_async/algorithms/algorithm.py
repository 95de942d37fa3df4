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
- With a process group, `batch` holds this rank's sequences and every number is global; without
  one it holds all of them. Either way the result is the same for any split of sequences.
- Minibatches hold whole groups (RAPID's baseline and denominators need them).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from megatron_async_kernels import is_loss, policy_loss
from megatron_async_kernels.backend import Backend
from megatron_async_kernels.loss_torch import generation_log_weight
from megatron_async_kernels.loss_types import (
    Denominators,
    LossInputs,
    LossOutput,
    check_finite,
)
from megatron_async_kernels.packed import segment_sum, spread
from megatron_async_kernels.surrogates import bounded_exp, truncate
from torch import distributed

from megatron_async.algorithms import advantages
from megatron_async.algorithms.correction import (
    compute_rollout_correction,
    correct,
    weight_mean,
)
from megatron_async.algorithms.loss_settings import loss_config
from megatron_async.algorithms.metrics import batch_staleness
from megatron_async.algorithms.own_loss import own_loss
from megatron_async.algorithms.reduce import Reducer
from megatron_async.config import RunConfig
from megatron_async.config.algorithm import AlgorithmConfig
from megatron_async.config.recipes import recipe_defaults

FloatVector = npt.NDArray[np.floating]


class BatchLike(Protocol):
    """The part of a `TokenBatch` that is read here (frozen; `replace` makes changed copies)."""

    @property
    def loss_mask_T(self) -> Any: ...

    @property
    def rollout_logprobs_T(self) -> Any: ...

    @property
    def lag_T(self) -> Any: ...

    @property
    def cu_seqlens_S1(self) -> Any: ...

    @property
    def rewards_S(self) -> Any: ...

    @property
    def group_ids_S(self) -> Any: ...

    @property
    def prompt_lengths_S(self) -> Any: ...

    @property
    def resumed_S(self) -> Any: ...

    @property
    def advantages_T(self) -> Any: ...

    @property
    def old_logprobs_T(self) -> Any: ...

    @property
    def ref_logprobs_T(self) -> Any: ...

    @property
    def is_weights_T(self) -> Any: ...


Batch = TypeVar("Batch", bound=BatchLike)


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
    """Settings and nothing else; all methods are pure (collectives apart)."""

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

    def prepare(
        self, batch: Batch, process_group: distributed.ProcessGroup | None = None
    ) -> tuple[Batch, dict[str, float]]:
        """Advantages (RAPID's excepted), weights and mask of decoupled correction, metrics.

        Raises NonFiniteError naming the array, ValueError when log-probs are missing.
        """
        reducer = Reducer(process_group)
        metrics = batch_staleness(
            self._tensor(batch.lag_T),
            self._tensor(batch.loss_mask_T),
            self._tensor(batch.resumed_S),
            reducer,
        )
        corrected = batch
        if self.needs_old_logprobs:
            corrected, found = self._decoupled(batch, process_group)
            metrics |= found
        rewards_S = self._rewards(batch)
        rows_SK = self._rows(corrected, rewards_S)
        all_SK, mine = reducer.gather(rows_SK)
        if all_SK.shape[0]:
            metrics |= _reward_metrics(all_SK)
        if self.config.advantage.estimator == "rapid":
            return corrected, metrics
        advantages_S = self._advantages(all_SK)[mine]
        return self._with_advantages(corrected, advantages_S), metrics

    def prepare_minibatch(
        self,
        batch: Batch,
        logprobs_T: FloatVector | torch.Tensor | None = None,
        process_group: distributed.ProcessGroup | None = None,
    ) -> tuple[Batch, Denominators]:
        """Return the batch and denominators that a step shares; some depend on the current policy.

        `logprobs_T` are those of the no-gradient pass, needed when `needs_minibatch_pass`.
        """
        reducer = Reducer(process_group)
        mask_T, cu_S1 = self._tensor(batch.loss_mask_T), self._cu_seqlens(batch)
        tokens, sequences = reducer.sum(mask_T != 0, segment_sum(mask_T, cu_S1) > 0)
        denominators = Denominators(tokens, sequences)
        if not self.needs_minibatch_pass:
            return batch, denominators
        if logprobs_T is None:
            raise ValueError("this algorithm needs the log-probs of a no-gradient pass, got None")
        current_T = self._tensor(logprobs_T)
        anchor_T = self._anchor(batch)
        check_finite({"logprobs": current_T, "anchor_logprobs": anchor_T}, mask_T)
        log_ratio_T = current_T - anchor_T
        if self._normalizes_in_loss:
            mean = self._weight_mean(log_ratio_T, mask_T, cu_S1, reducer)
            denominators = replace(denominators, weight_mean=mean)
        if self.config.advantage.estimator == "rapid":
            log_weight_S = generation_log_weight(log_ratio_T, mask_T, cu_S1)
            rows_SK = self._rows(batch, self._rewards(batch), log_weight_S)
            all_SK, mine = reducer.gather(rows_SK)
            batch = self._with_advantages(batch, self._rapid_advantages(all_SK)[mine])
        return batch, denominators

    def inputs(
        self,
        batch: BatchLike,
        logprobs_T: torch.Tensor,
        entropy_T: torch.Tensor | None = None,
    ) -> LossInputs:
        """A prepared (micro)batch and the current log-probs as the loss reads them.

        Arrays go to the device of `logprobs_T`. For SFT the rollout policy is the current one.
        """
        device, dtype = logprobs_T.device, logprobs_T.dtype

        def read(array_T: FloatVector | None) -> torch.Tensor | None:
            if array_T is None:
                return None
            return _copy(array_T).to(device, dtype)

        if batch.advantages_T is None:
            raise ValueError("the batch has no advantages; call prepare (and prepare_minibatch)")
        current_T = logprobs_T.detach()
        is_sft = self.loss_config.surrogate == "sft"
        return LossInputs(
            logprobs_T=current_T,
            rollout_logprobs_T=current_T if is_sft else read(batch.rollout_logprobs_T),  # type: ignore[arg-type]
            advantages_T=read(batch.advantages_T),  # type: ignore[arg-type]
            mask_T=read(batch.loss_mask_T),  # type: ignore[arg-type]
            cu_seqlens_S1=_copy(batch.cu_seqlens_S1).to(device),
            old_logprobs_T=read(batch.old_logprobs_T),
            ref_logprobs_T=read(batch.ref_logprobs_T),
            entropy_T=None if entropy_T is None else entropy_T.detach(),
            is_weights_T=read(batch.is_weights_T),
            lag_T=_copy(batch.lag_T).to(device),
        )

    def loss(
        self, inputs: LossInputs, denominators: Denominators, *, backend: Backend = "auto"
    ) -> LossOutput:
        """The loss of one microbatch; `backend` as in `is_loss`."""
        if self._own_loss is not None:
            return policy_loss(inputs, self.loss_config, denominators, own=self._own_loss)
        return is_loss(inputs, self.loss_config, denominators, backend=backend)

    def correction_metrics(
        self,
        batch: BatchLike,
        logprobs_T: FloatVector | torch.Tensor,
        process_group: distributed.ProcessGroup | None = None,
    ) -> dict[str, float]:
        """`rollout_corr/` of a minibatch in bypass mode, from the log-probs its loss saw.

        In decoupled mode `prepare` reports them. Empty for SFT and for a minibatch without any
        trained token.
        """
        mask_T = self._tensor(batch.loss_mask_T)
        if not self.config.correction.bypass_mode or self.loss_config.surrogate == "sft":
            return {}
        if Reducer(process_group).sum(mask_T != 0)[0] == 0:
            return {}
        level, threshold = self._reported_weights()
        correction = self.config.correction
        return compute_rollout_correction(
            self._tensor(logprobs_T),
            self._tensor(batch.rollout_logprobs_T),
            mask_T,
            cu_seqlens=self._cu_seqlens(batch),
            rollout_is=level,
            rollout_is_threshold=threshold,
            rollout_is_batch_normalize=self._normalizes_in_loss,
            rollout_rs=correction.rollout_rs,
            rollout_rs_threshold=correction.rollout_rs_threshold,
            process_group=process_group,
        )[2]

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

    def _decoupled(
        self, batch: Batch, group: distributed.ProcessGroup | None
    ) -> tuple[Batch, dict[str, float]]:
        if batch.old_logprobs_T is None:
            raise ValueError("decoupled correction needs old_logprobs_T, got None")
        mask_T = self._tensor(batch.loss_mask_T)
        if Reducer(group).sum(mask_T != 0)[0] == 0:
            return batch, {}
        weights_T, kept_T, metrics = correct(
            self.config.correction,
            self._tensor(batch.old_logprobs_T),
            self._tensor(batch.rollout_logprobs_T),
            mask_T,
            self._cu_seqlens(batch),
            group,
        )
        mask_array = kept_T.cpu().numpy().astype(batch.loss_mask_T.dtype)
        weights_array = None if weights_T is None else weights_T.cpu().numpy()
        changed = replace(batch, loss_mask_T=mask_array, is_weights_T=weights_array)  # type: ignore[type-var]
        return changed, metrics

    def _rewards(self, batch: BatchLike) -> torch.Tensor:
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

    def _rows(
        self, batch: BatchLike, rewards_S: torch.Tensor, log_weight_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return reward, group id, trained tokens and log weight by sequence; float64 [S, 4]."""
        groups_S = self._tensor(batch.group_ids_S)
        tokens_S = segment_sum(self._tensor(batch.loss_mask_T), self._cu_seqlens(batch))
        if log_weight_S is None:
            log_weight_S = torch.zeros_like(rewards_S)
        return torch.stack([rewards_S, groups_S, tokens_S, log_weight_S], dim=1)

    def _advantages(self, all_SK: torch.Tensor) -> torch.Tensor:
        rewards_S, groups_S, tokens_S, _ = all_SK.unbind(dim=1)
        index_S = torch.unique(groups_S, return_inverse=True)[1]
        settings = self.config.advantage
        if settings.estimator in ("grpo", "dr_grpo"):
            return advantages.group_advantages(
                rewards_S,
                index_S,
                normalize_std=settings.estimator == "grpo",
                epsilon=settings.std_epsilon,
            )
        if settings.estimator == "rloo":
            return advantages.leave_one_out_advantages(rewards_S, index_S)
        if settings.estimator == "reinforce_pp":
            return advantages.whitened_advantages(rewards_S, tokens_S)
        if settings.estimator == "pg":
            return advantages.batch_baseline_advantages(rewards_S)
        return torch.ones_like(rewards_S)

    def _rapid_advantages(self, all_SK: torch.Tensor) -> torch.Tensor:
        rewards_S, groups_S, _, log_weight_S = all_SK.unbind(dim=1)
        index_S = torch.unique(groups_S, return_inverse=True)[1]
        rapid = self.config.rapid
        return advantages.rapid_advantages(
            rewards_S, log_weight_S, index_S, eta=rapid.eta, leave_one_out=rapid.leave_one_out
        )

    def _weight_mean(
        self,
        log_ratio_T: torch.Tensor,
        mask_T: torch.Tensor,
        cu_S1: torch.Tensor,
        reducer: Reducer,
    ) -> float:
        config = self.loss_config
        if config.weight_level == "token":
            raw_T = bounded_exp(log_ratio_T)[0]
        else:
            total_S = generation_log_weight(log_ratio_T, mask_T, cu_S1)
            raw_T = spread(bounded_exp(total_S)[0], cu_S1)
        weights_T, _, _ = truncate(raw_T, config.weight_lower, config.weight_upper)
        return weight_mean(weights_T, mask_T, cu_S1, config.weight_level, reducer)

    def _with_advantages(self, batch: Batch, advantages_S: torch.Tensor) -> Batch:
        advantages_T = spread(advantages_S, self._cu_seqlens(batch)).cpu().numpy()
        return replace(batch, advantages_T=advantages_T)  # type: ignore[type-var]

    def _anchor(self, batch: BatchLike) -> torch.Tensor:
        if not self.needs_old_logprobs:
            return self._tensor(batch.rollout_logprobs_T)
        if batch.old_logprobs_T is None:
            raise ValueError("decoupled mode needs old_logprobs_T, got None")
        return self._tensor(batch.old_logprobs_T)

    def _tensor(self, array: FloatVector | torch.Tensor) -> torch.Tensor:
        return _copy(array).to(self.device, torch.float64)

    def _cu_seqlens(self, batch: BatchLike) -> torch.Tensor:
        return _copy(batch.cu_seqlens_S1).to(self.device, torch.int64)


def _copy(array: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
    """A tensor of its own: arrays of a batch may be read-only."""
    return array.detach() if isinstance(array, torch.Tensor) else torch.tensor(array)


def _reward_metrics(all_SK: torch.Tensor) -> dict[str, float]:
    rewards_S, groups_S, _, _ = all_SK.unbind(dim=1)
    index_S = torch.unique(groups_S, return_inverse=True)[1]
    informative_G = advantages.informative_groups(rewards_S, index_S)
    return {
        "reward/mean": float(rewards_S.mean()),
        "reward/std": float(rewards_S.std(correction=0)),
        "reward/min": float(rewards_S.min()),
        "reward/max": float(rewards_S.max()),
        "reward/uninformative_groups": 1.0 - float(informative_G.double().mean()),
    }

"""Tests the loss of a microbatch: its value, gradients and metric sums against the oracle and
autograd."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_async_kernels.loss_torch import divergence, policy_loss
from megatron_async_kernels.loss_types import (
    LAG_SUM_NAMES,
    MAX_NAMES,
    SUM_NAMES,
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    NonFiniteError,
    attach_gradient,
)

from tests.algorithms import oracle
from tests.algorithms.autograd import autograd_loss
from tests.algorithms.cases import Case, assert_close, cases, loss_configs
from tests.kernels.loss_cases import exact_k3, expected_slopes, kl_alone

DENOMINATORS = Denominators(tokens=17.0, sequences=5.0, weight_mean=1.25)


def inputs_of(case: Case, dtype: torch.dtype = torch.float64) -> LossInputs:
    return LossInputs(
        logprobs_T=case.packed("p").to(dtype),
        rollout_logprobs_T=case.packed("rollout").to(dtype),
        advantages_T=case.packed("advantage").to(dtype),
        mask_T=case.mask.to(dtype),
        cu_seqlens_S1=case.cu_seqlens,
        old_logprobs_T=case.packed("old").to(dtype),
        ref_logprobs_T=case.packed("ref").to(dtype),
        entropy_T=case.packed("entropy").to(dtype),
        is_weights_T=case.packed("v").to(dtype),
        lag_T=case.lag,
    )


@given(case=cases(), config=loss_configs)
@settings(max_examples=400)
def test_policy_loss_value_gradients_and_metrics_equal_the_oracle(
    case: Case, config: LossConfig
) -> None:
    output = policy_loss(inputs_of(case), config, DENOMINATORS)
    expected = oracle.loss(case.rows, config, 17.0, 5.0, 1.25)
    assert_close(float(output.loss_sum), expected.value, "loss")
    gradients = [("dlogp", output.dlogp_T, expected.dlogp)]
    if config.entropy_coef:
        assert output.dentropy_T is not None
        gradients.append(("dentropy", output.dentropy_T, expected.dentropy))
    else:
        assert output.dentropy_T is None
    for name, stream, rows in gradients:
        assert bool((stream[case.mask == 0] == 0).all()), f"{name} of untrained tokens"
        for got, wanted in zip(case.unpack(stream), rows, strict=True):
            for a, b in zip(got, wanted, strict=True):
                assert_close(a, b, name)
    sums = output.metrics.sums()
    for name in (*SUM_NAMES, *MAX_NAMES):
        assert_close(sums[name], expected.sums.get(name, 0.0), name)
    for name, got, wanted in zip(
        LAG_SUM_NAMES, output.metrics.lag_sums_LB.tolist(), expected.by_lag.tolist(), strict=True
    ):
        for a, b in zip(got, wanted, strict=True):
            assert_close(a, b, name)


@given(case=cases(min_trained=1), config=loss_configs)
@settings(max_examples=300)
def test_policy_loss_gradients_equal_float64_autograd(case: Case, config: LossConfig) -> None:
    inputs = inputs_of(case)
    output = policy_loss(inputs, config, DENOMINATORS)
    value, dlogp_T, dentropy_T = autograd_loss(inputs, config, DENOMINATORS)
    assert_close(float(output.loss_sum), value, "loss")
    for a, b in zip(output.dlogp_T.tolist(), dlogp_T.tolist(), strict=True):
        assert_close(a, b, "dlogp")
    if output.dentropy_T is not None:
        torch.testing.assert_close(output.dentropy_T, dentropy_T, rtol=1e-6, atol=1e-9)


@given(case=cases(min_trained=1), config=loss_configs, data=st.data())
@settings(max_examples=150)
def test_policy_loss_does_not_depend_on_the_split_into_microbatches(
    case: Case, config: LossConfig, data: st.DataObject
) -> None:
    whole = policy_loss(inputs_of(case), config, DENOMINATORS)
    order = data.draw(st.permutations(range(len(case.rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order)), max_size=3)) | {len(order)})
    merged, total = LossMetrics.empty(), 0.0
    gradient: dict[int, list[float]] = {}
    for low, high in zip([0, *cuts[:-1]], cuts, strict=True):
        microbatch = case.rows_of(order[low:high])
        output = policy_loss(inputs_of(microbatch), config, DENOMINATORS)
        merged, total = merged.merge(output.metrics), total + float(output.loss_sum)
        gradient |= dict(zip(order[low:high], microbatch.unpack(output.dlogp_T), strict=True))
    assert_close(total, float(whole.loss_sum), "loss")
    for row, wanted in enumerate(case.unpack(whole.dlogp_T)):
        for a, b in zip(gradient[row], wanted, strict=True):
            assert_close(a, b, "dlogp")
    expected = whole.metrics.sums()
    for name, value in merged.sums().items():
        assert_close(value, expected[name], name)
    torch.testing.assert_close(merged.lag_sums_LB, whole.metrics.lag_sums_LB, rtol=1e-6, atol=1e-6)


@given(case=cases(min_trained=1), config=loss_configs)
@settings(max_examples=50)
def test_policy_loss_in_float32_is_close_to_float64(case: Case, config: LossConfig) -> None:
    output = policy_loss(inputs_of(case, torch.float32), config, DENOMINATORS)
    expected = policy_loss(inputs_of(case), config, DENOMINATORS)
    assert output.dlogp_T.dtype == output.loss_sum.dtype == torch.float32
    torch.testing.assert_close(output.loss_sum.double(), expected.loss_sum, rtol=1e-3, atol=1e-3)


def one_token(p: float, rollout: float = 0.0, advantage: float = 1.0, **more: float) -> LossInputs:
    def stream(value: float) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.float64)

    return LossInputs(
        stream(p),
        stream(rollout),
        stream(advantage),
        stream(1.0),
        torch.tensor([0, 1]),
        **{f"{name}_T": stream(value) for name, value in more.items()},
    )


def slope(inputs: LossInputs, **settings_: object) -> float:
    config = LossConfig(**settings_)  # type: ignore[arg-type]
    return float(policy_loss(inputs, config, Denominators(1.0, 1.0)).dlogp_T[0])


def test_kl_estimators_have_the_gradient_of_the_kl_on_off_policy_data() -> None:
    """Checks sum_y mu(y) dlogp(y) grad log pi(y) = grad KL(pi || ref).

    pi is a softmax over three tokens and mu another distribution; no weight is truncated.
    """
    logits = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    mu = torch.tensor([0.25, 0.35, 0.4], dtype=torch.float64)
    log_pi = logits.log_softmax(0)
    (expected,) = torch.autograd.grad(
        (log_pi.exp() * (log_pi - ref.log())).sum(), logits, retain_graph=True
    )
    for estimator in ("k2", "k3"):
        config = LossConfig(
            aggregation="seq_mean_token_sum",
            kl_estimator=estimator,
            kl_coef=1.0,
            kl_weight_upper=99,
        )
        inputs = LossInputs(
            logprobs_T=log_pi.detach(),
            rollout_logprobs_T=mu.log(),
            ref_logprobs_T=ref.log(),
            advantages_T=torch.zeros(3, dtype=torch.float64),
            mask_T=torch.ones(3, dtype=torch.float64),
            cu_seqlens_S1=torch.tensor([0, 1, 2, 3]),
        )
        slopes = policy_loss(inputs, config, Denominators(3.0, 1.0)).dlogp_T
        (actual,) = torch.autograd.grad((mu * slopes * log_pi).sum(), logits, retain_graph=True)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_policy_loss_is_zero_when_no_token_is_trained() -> None:
    empty = torch.zeros(0)
    for mask in (empty, torch.zeros(4)):
        stream = torch.zeros(mask.numel())
        for surrogate in ("ppo_clip", "gspo", "reinforce"):
            output = policy_loss(
                LossInputs(stream, stream, stream, mask, torch.tensor([0, 0, mask.numel()])),
                LossConfig(surrogate=surrogate, aggregation="seq_mean_token_mean"),  # type: ignore[arg-type]
                Denominators(0.0, 0.0),
            )
            assert float(output.loss_sum) == 0.0 and output.dlogp_T.abs().sum() == 0.0
            assert output.metrics.sums()["tokens"] == 0.0


@pytest.mark.parametrize(
    "name",
    [
        "logprobs",
        "rollout_logprobs",
        "old_logprobs",
        "ref_logprobs",
        "advantages",
        "entropy",
        "is_weights",
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_policy_loss_names_the_input_that_is_not_finite(name: str, value: float) -> None:
    inputs = one_token(0.0, old_logprobs=0.0, ref_logprobs=0.0, entropy=0.0, is_weights=1.0)
    broken = dataclasses.replace(inputs, **{f"{name}_T": torch.tensor([value])})
    with pytest.raises(NonFiniteError, match=rf"^{name} has 1 non-finite values"):
        policy_loss(broken, LossConfig(), Denominators(1.0, 1.0))


@pytest.mark.parametrize(
    ("settings_", "name"),
    [
        ({"ratio_to": "old"}, "old_logprobs_T"),
        ({"kl_estimator": "k2"}, "ref_logprobs_T"),
        ({"entropy_coef": 0.1}, "entropy_T"),
    ],
)
def test_policy_loss_names_the_input_that_is_missing(settings_: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"the loss needs {name}"):
        slope(one_token(0.0), **settings_)


def test_attach_gradient_passes_gradients_to_log_probs_and_entropy() -> None:
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    log_T5 = logits.log_softmax(-1)
    logprobs_T, entropy_T = log_T5[:, 0], -(log_T5.exp() * log_T5).sum(-1)
    inputs = LossInputs(
        logprobs_T.detach(),
        logprobs_T.detach() - 0.1,
        torch.ones(4).double(),
        torch.tensor([0.0, 1, 1, 1]).double(),
        torch.tensor([0, 4]),
        entropy_T=entropy_T.detach(),
    )
    output = policy_loss(inputs, LossConfig(entropy_coef=0.1), Denominators(3.0, 1.0))
    loss = attach_gradient(output, logprobs_T, entropy_T)
    assert loss.item() == output.loss_sum.item()
    (2.0 * loss).backward(retain_graph=True)
    assert output.dentropy_T is not None
    surrogate = (logprobs_T * output.dlogp_T).sum() + (entropy_T * output.dentropy_T).sum()
    (expected,) = torch.autograd.grad(2.0 * surrogate, logits)
    torch.testing.assert_close(logits.grad, expected)
    assert attach_gradient(output, logprobs_T.detach().requires_grad_()).requires_grad


@pytest.mark.parametrize("weight_upper", [4.0, 0.5])
def test_k3_gradient_has_no_cancellation_at_small_distances(weight_upper: float) -> None:
    inputs, config, denominators, distance_T = kl_alone(weight_upper)
    output = policy_loss(inputs, config, denominators)
    expected_T = expected_slopes(distance_T, weight_upper)
    torch.testing.assert_close(output.dlogp_T.double(), expected_T, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 2e-15)])
def test_k3_value_has_no_cancellation_at_small_distances(dtype: torch.dtype, rtol: float) -> None:
    distance_T = kl_alone(1.0)[-1].to(dtype)
    expected_T = torch.tensor([exact_k3(d)[0] for d in distance_T.tolist()], dtype=torch.float64)
    found_T = divergence(-distance_T, "k3").double()
    torch.testing.assert_close(found_T, expected_T, rtol=rtol, atol=0.0)

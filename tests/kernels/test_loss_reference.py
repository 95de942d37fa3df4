"""The loss reference equals `megatron_async.algorithms`, and its gradient is that of its value."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from megatron_async_kernels import loss_types
from megatron_async_kernels.loss_reference import reference_is_loss
from megatron_async_kernels.loss_types import (
    Denominators,
    LossConfig,
    LossInputs,
    NonFiniteInput,
    mirror,
)

from megatron_async.algorithms import interface
from megatron_async.algorithms.losses import policy_loss
from tests.kernels.loss_cases import CONFIGS, DENOMINATORS, assert_same_output, make_inputs

LENGTHS = [5, 0, 17, 1, 30, 8]


@pytest.mark.parametrize("kind", ["RejectionRule", "LossConfig", "LossInputs", "Denominators"])
def test_types_are_the_interface_field_for_field(kind: str) -> None:
    ours, theirs = getattr(loss_types, kind), getattr(interface, kind)
    described = [
        [(field.name, field.default) for field in dataclasses.fields(each)]
        for each in (ours, theirs)
    ]
    assert described[0] == described[1]


def test_names_and_bounds_are_the_interface() -> None:
    for name in ("SUM_NAMES", "LAG_SUM_NAMES", "MAX_NAMES", "NUM_LAG_BINS", "SAFETY_BOUND"):
        assert getattr(loss_types, name) == getattr(interface, name)
    assert loss_types.GSPO_LOG_BOUND == interface.GSPO_LOG_BOUND


def theirs(config: LossConfig) -> interface.LossConfig:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values["rejection"] = tuple(
        interface.RejectionRule(rule.level, rule.divergence, rule.lower, rule.upper)
        for rule in config.rejection
    )
    return interface.LossConfig(**values)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("drift", [0.3, 15.0])
def test_equals_the_algorithms_package(name: str, drift: float) -> None:
    """drift 15 passes the safety bound in many tokens."""
    inputs = make_inputs(LENGTHS, drift=drift)
    values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    expected = policy_loss(
        interface.LossInputs(**values),
        theirs(CONFIGS[name]),
        interface.Denominators(**dataclasses.asdict(DENOMINATORS)),
    )
    actual = reference_is_loss(inputs, CONFIGS[name], DENOMINATORS)
    assert_same_output(actual, typing.cast(typing.Any, expected), rtol=1e-9, atol=1e-9)


def test_mirror_takes_the_other_packages_types() -> None:
    for config in CONFIGS.values():
        assert mirror(LossConfig, theirs(config)) == config
    counts = interface.Denominators(tokens=3, sequences=2)
    assert mirror(Denominators, counts) == Denominators(tokens=3, sequences=2)


# The others detach part of their value by definition, or decide on rejection.
SMOOTH = ("ppo", "ppo dual, old", "ppo, kl k3, entropy", "reinforce", "sft")


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """Central differences in every token."""
    config = CONFIGS[name]
    inputs = make_inputs([4, 6], mask_share=1.0)
    output = reference_is_loss(inputs, config, DENOMINATORS)
    step = 1e-6
    for token in range(10):
        values = []
        for sign in (1.0, -1.0):
            moved_T = inputs.logprobs_T.clone()
            moved_T[token] += sign * step
            moved = dataclasses.replace(inputs, logprobs_T=moved_T)
            values.append(float(reference_is_loss(moved, config, DENOMINATORS).loss_sum))
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(float(output.dlogp_T[token]), abs=1e-7)


def test_non_finite_input_is_named() -> None:
    inputs = make_inputs([3, 3], mask_share=1.0)
    broken_T = inputs.advantages_T.clone()
    broken_T[2] = torch.inf
    with pytest.raises(NonFiniteInput, match="advantages has 1 non-finite"):
        reference_is_loss(
            dataclasses.replace(inputs, advantages_T=broken_T), LossConfig(), DENOMINATORS
        )


def test_missing_stream_is_named() -> None:
    inputs = dataclasses.replace(make_inputs([3]), old_logprobs_T=None)
    assert isinstance(inputs, LossInputs)
    with pytest.raises(ValueError, match="needs old_logprobs_T"):
        reference_is_loss(inputs, LossConfig(ratio_to="old"), DENOMINATORS)

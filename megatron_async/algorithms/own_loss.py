"""Imports a loss that the user has written (`algorithm.loss.name` is then an import path), and
calls it once on a small example before a run starts.

The loss is a function from `LossInputs` (fields in `megatron_async_kernels.loss_types`) to the loss
of each token, [T]. `OwnLoss` in `megatron_async_kernels.loss_torch` describes what it may do.
"""

from functools import partial

import torch
from megatron_async_kernels import Denominators, LossInputs, NonFiniteError, OwnLoss, policy_loss

from megatron_async.algorithms.loss_settings import loss_config
from megatron_async.config.algorithm import AlgorithmConfig
from megatron_async.errors import UserError
from megatron_async.runtime.import_path import described, is_import_path, load_object


def own_loss(config: AlgorithmConfig) -> OwnLoss | None:
    """Import the function to which `algorithm.loss.name` is the import path; return None if it is
    the name of a built-in loss.

    Raises:
        UserError: If the path cannot be imported or does not lead to a function.
    """
    settings = config.loss
    if not is_import_path(settings.name):
        return None
    function = load_object(settings.name, "algorithm.loss.name")
    if not callable(function):
        raise UserError(f"algorithm.loss.name is {settings.name!r}; it must import a function")
    return partial(function, **settings.arguments) if settings.arguments else function


def check_own_loss(config: AlgorithmConfig) -> None:
    """If the run has a loss that the user has written, call it once on an example of six tokens.

    Raises:
        UserError: If the loss fails, returns an invalid result, or has no gradient.
    """
    function = own_loss(config)
    if function is None:
        return
    values_T = torch.linspace(-2.0, -0.1, 6)
    inputs = LossInputs(
        logprobs_T=values_T,
        rollout_logprobs_T=values_T - 0.05,
        advantages_T=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        mask_T=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        cu_seqlens_S1=torch.tensor([0, 3, 6]),
        old_logprobs_T=values_T - 0.02,
        ref_logprobs_T=values_T - 0.1,
        entropy_T=-values_T,
        is_weights_T=torch.ones(6),
        lag_T=torch.tensor([0, 0, 1, 0, 0, 2]),
    )
    where = f"algorithm.loss.name is {config.loss.name!r}"
    try:
        output = policy_loss(inputs, loss_config(config), Denominators(5.0, 2.0), own=function)
    except (ValueError, NonFiniteError) as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # The user's function may raise any exception.
        raise UserError(f"{where}: {described(error)}") from error
    slopes = (output.dlogp_T, output.dentropy_T)
    if not any(slope is not None and bool(slope.any()) for slope in slopes):
        raise UserError(
            f"{where}; its loss has no gradient. It must depend on logprobs_T or entropy_T."
        )

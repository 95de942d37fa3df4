"""A batch goes to the device once, and only what a report holds comes back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_async_kernels import LossInputs

import megatron_async
from megatron_async.trajectory.batch import TokenBatch
from tests.syntax import parse
from tests.trainer.cases import (
    ragged_batch,
    settings,
    single_process,
    trainer_session,
    write_model,
)

PACKAGE = Path(megatron_async.__file__).parent
READ = (
    "token_ids_T",
    "loss_mask_T",
    "rollout_logprobs_T",
    "lag_T",
    "cu_seqlens_S1",
    "rewards_S",
    "group_ids_S",
    "trajectory_ids_S",
    "prompt_lengths_S",
    "resumed_S",
)
# What is no batch and no result: a copy that Megatron asks for.
OTHER_COPIES = {"trainer/device.py"}


class Copies:
    """Counts arrays that become tensors, and tensors that become arrays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up: list[np.ndarray] = []
        self.down: list[torch.Tensor] = []
        for name in ("tensor", "as_tensor", "asarray", "from_numpy"):
            monkeypatch.setattr(torch, name, self._counted(getattr(torch, name)))
        whole = torch.Tensor.numpy

        def numpy(tensor: torch.Tensor, **options: Any) -> np.ndarray:
            if not any(tensor is one for one in self.down):  # the device adapter calls it again
                self.down.append(tensor)
            return whole(tensor, **options)

        monkeypatch.setattr(torch.Tensor, "numpy", numpy)

    def _counted(self, function: Any) -> Any:
        def counted(data: Any, *args: Any, **options: Any) -> torch.Tensor:
            if isinstance(data, np.ndarray):
                self.up.append(data)
            return function(data, *args, **options)

        return counted

    def names(self, batch: TokenBatch) -> list[str]:
        """The batch's own arrays among those that went up."""
        arrays = {**vars(batch), **batch.columns}
        return [name for up in self.up for name, array in arrays.items() if array is up]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({"recipe": "copris"}, 2),
        ({"recipe": "grpo", "kl": {"loss_coef": 0.1, "loss_estimator": "k3"}}, 4),
        ({"recipe": "rapid"}, 4),
    ],
    ids=["two updates", "old policy and reference", "a pass before each update"],
)
def test_each_array_of_a_batch_goes_up_once(
    algorithm: dict[str, Any], passes: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"algorithm": algorithm, "schedule": {"updates_per_batch": 2}}
    with single_process(), trainer_session(settings(model_dir, changes)) as trainer:
        batch, copies = ragged_batch(), Copies(monkeypatch)
        report = trainer.train_batch(batch)
    assert report.updates == 2 and report.num_microbatches > 3
    assert sorted(copies.names(batch)) == sorted(READ)
    orders = copies.up[len(READ) :]
    assert len(orders) == passes, "each pass has an order of sequences, and nothing of a token"
    assert all(order.size <= batch.num_sequences for order in orders)
    assert [len(down) for down in copies.down] == [report.log_weights.size]


def test_fine_tuning_and_scoring_upload_once_too(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with single_process(), trainer_session(settings(model_dir), purpose="sft") as trainer:
        batch, copies = ragged_batch(), Copies(monkeypatch)
        trainer.train_sft(batch)
        assert sorted(copies.names(batch)) == sorted(READ) and not copies.down
        trainer.compute_logprobs(batch)
        assert sorted(copies.names(batch)) == sorted(READ * 2)
        assert [len(down) for down in copies.down] == [batch.num_tokens]


def conversions(file: Path) -> Iterator[int]:
    """Lines that make a tensor of an array, or an array of a tensor."""
    for node in ast.walk(parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            data = node.args[0] if node.args else None
            named = isinstance(data, ast.Name | ast.Attribute | ast.Subscript)
            if node.func.attr in ("from_numpy", "as_tensor", "asarray", "numpy") or (
                node.func.attr == "tensor" and named
            ):
                yield node.lineno


def test_one_file_of_the_trainer_and_the_losses_turns_arrays_into_tensors_and_back() -> None:
    files = [file for room in ("algorithms", "trainer") for file in (PACKAGE / room).rglob("*.py")]
    found = {str(file.relative_to(PACKAGE)) for file in files if any(conversions(file))}
    assert found == {"algorithms/device_batch.py"} | OTHER_COPIES


seen: list[LossInputs] = []


def reading_routes(tokens: LossInputs) -> torch.Tensor:
    seen.append(tokens)
    return -tokens.logprobs_T * tokens.columns["routes"][:, 1, 3].float()


def test_a_column_reaches_a_loss_of_the_users_beside_its_token(model_dir: Path) -> None:
    """Both hold the token's place in the batch."""
    batch = ragged_batch()
    place_T = np.arange(batch.num_tokens)
    routes_T = np.broadcast_to(place_T[:, None, None], (batch.num_tokens, 2, 4)).astype(np.int16)
    logprobs_T = (-place_T * batch.loss_mask_T / 1024).astype(np.float32)
    batch = replace(batch, rollout_logprobs_T=logprobs_T, columns={"routes": routes_T})
    changes = {
        "algorithm": {"recipe": "copris", "loss": f"{__name__}:reading_routes"},
        "schedule": {"updates_per_batch": 2},
    }
    seen.clear()
    with single_process(), trainer_session(settings(model_dir, changes)) as trainer:
        assert not trainer.train_batch(batch).skipped
    assert len(seen) > 3
    places = torch.cat([tokens.columns["routes"][:, 0, 0] for tokens in seen])
    logprobs = torch.cat([tokens.rollout_logprobs_T for tokens in seen])
    assert places.dtype is torch.int16 and torch.equal(-logprobs * 1024, places.float())
    assert sorted(places.tolist()) == np.flatnonzero(batch.loss_mask_T).tolist()

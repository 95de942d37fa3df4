"""Stand-ins for missing packages: loud when really used; and the one real operation."""

from __future__ import annotations

import pytest
import torch

from megatron_async.engines.sglang.cpu import (
    StandIn,
    assign_req_to_token_pool,
)


def test_classes_of_a_stand_in_can_be_subclassed_and_named_but_functions_raise() -> None:
    package = StandIn("some_gpu_package")

    class Mine(package.Transform):  # type: ignore[misc, name-defined]
        """As GPU packages are used at module level."""

    assert isinstance(Mine(1, mode=2), package.Transform)
    assert package.InterpolationMode.BICUBIC == "BICUBIC"
    with pytest.raises(AttributeError):
        _ = package.__wrapped__
    with pytest.raises(RuntimeError, match="some_gpu_package was called"):
        package(3, 4)


def test_slots_of_all_requests_go_to_their_rows() -> None:
    table = torch.zeros(4, 6, dtype=torch.int32)
    assign_req_to_token_pool(
        torch.tensor([2, 0]),
        table,
        torch.tensor([1, 0]),
        torch.tensor([4, 2]),
        torch.tensor([11, 12, 13, 21, 22]),
        6,
    )
    assert table.tolist() == [[21, 22, 0, 0, 0, 0], [0] * 6, [0, 11, 12, 13, 0, 0], [0] * 6]

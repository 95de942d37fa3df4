"""How torch's variable-length attention is called, on each release that has it.

`tests/data/varlen_attn.json` holds the parameters of `varlen_attn` in torch 2.11 to 2.14, read from
the published wheels.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.trainer.attention import packed_attention, varlen_call

RELEASES: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "varlen_attn.json").read_text()
)
OLDEST = {"positional": RELEASES["2.11.0"]["positional"], "keyword": ["is_causal"]}


def stand_in(release: dict[str, list[str]]) -> Any:
    """`varlen_attn` of a release: refuses what it does not know, computes the rest on the CPU."""

    def attend(*positional: Any, **keyword: Any) -> Tensor:
        assert len(positional) == len(release["positional"])
        unknown = set(keyword) - set(release["keyword"])
        if unknown:
            raise TypeError(f"unexpected keyword arguments {unknown}")
        query, key, value, cu_q, cu_k, max_q, max_k = positional
        assert cu_q is cu_k and max_q == max_k
        grouped = query.shape[1] != key.shape[1]
        assert not grouped or keyword.get("enable_gqa"), "heads differ without enable_gqa"
        left, right = keyword.get("window_size", (-1, 0))
        assert right == 0 and keyword.get("is_causal", True), "causal"
        scale = keyword.get("scale", query.shape[-1] ** -0.5)
        window = None if left == -1 else left + 1
        return packed_attention(query, key, value, cu_q, max_q, scale=scale, window=window)

    return attend


@pytest.mark.parametrize("release", [*RELEASES, "before"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_every_release_computes_the_same(release: str, kv_heads: int, window: int | None) -> None:
    known = RELEASES.get(release, OLDEST)
    call = varlen_call(frozenset(known["positional"] + known["keyword"]), window is not None)
    if release == "before" and window is not None:
        assert call is None, "a window cannot be asked for: one call a sequence instead"
        return
    assert call is not None
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(12, 4, 8, generator=generator)
    key, value = (torch.randn(12, kv_heads, 8, generator=generator) for _ in range(2))
    borders = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    found = call(stand_in(known), query, key, value, borders, 6, 0.3, window)
    expected = packed_attention(query, key, value, borders, 6, scale=0.3, window=window)
    torch.testing.assert_close(found, expected)


def test_the_installed_release_is_as_recorded() -> None:
    from torch.nn.attention.varlen import varlen_attn

    version = torch.__version__.partition("+")[0]
    if version not in RELEASES:
        pytest.skip(f"torch {version} is not recorded")
    found = list(inspect.signature(varlen_attn).parameters)
    assert found == RELEASES[version]["positional"] + RELEASES[version]["keyword"]

"""How torch's variable-length attention is called, in every release that is recorded.

`tests/data/varlen_attn.json` holds the parameters of `varlen_attn` in torch 2.11 to 2.14, read from
the published wheels. It has no CPU kernel, so a stand-in with the recorded signature reads its
arguments as the library documents them, and computes with whole matrices.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from megatron_async.trainer import attention_kernels
from megatron_async.trainer.attention_kernels import Stream, packed_attention, varlen_call

DATA = Path(__file__).parents[1] / "data"
VARLEN: dict[str, dict[str, list[str]]] = json.loads((DATA / "varlen_attn.json").read_text())


def reference(stream: Stream) -> Tensor:
    """Whole score matrices in float64, one entry's mask written out."""
    query, key, value, borders, _, scale, window = stream
    starts = [int(border) for border in borders]
    sequence = [sum(token >= start for start in starts[1:]) for token in range(len(query))]
    seen = torch.tensor(
        [
            [
                sequence[q] == sequence[k] and k <= q and (window is None or q - k < window)
                for k in range(len(query))
            ]
            for q in range(len(query))
        ]
    )
    heads = []
    for head in range(query.shape[1]):
        shared = head // stream.group
        scores = scale * query[:, head].double() @ key[:, shared].double().T
        weights = scores.masked_fill(~seen, float("-inf")).softmax(1)
        heads.append(weights @ value[:, shared].double())
    return torch.stack(heads, 1).to(query.dtype)


def example(kv_heads: int, window: int | None) -> Stream:
    generator = torch.Generator().manual_seed(0)

    def heads(count: int) -> Tensor:
        return torch.randn(12, count, 16, generator=generator)

    borders = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    return Stream(heads(4), heads(kv_heads), heads(kv_heads), borders, 6, 0.3, window)


Compute = Callable[[dict[str, Any]], Any]


def library(positional: list[str], keyword: list[str], compute: Compute) -> Callable[..., Any]:
    """A function of this signature, which refuses what that does not take."""
    places = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
    names = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in keyword]
    taken = inspect.Signature([*places, *names])

    def attend(*positions: Any, **named: Any) -> Any:
        return compute(taken.bind(*positions, **named).arguments)

    attend.__signature__ = taken  # type: ignore[attr-defined]
    return attend


def varlen(release: str) -> Callable[..., Any]:
    """Torch's: causal is a window to the left only, -1 is without end."""

    def compute(given: dict[str, Any]) -> Tensor:
        query, key = given["query"], given["key"]
        assert query.shape[1] == key.shape[1] or given.get("enable_gqa"), "as it checks itself"
        assert given["cu_seq_q"] is given["cu_seq_k"] and given["max_q"] == given["max_k"] == 6
        left, right = given["window_size"]
        assert right == 0
        borders, window = given["cu_seq_q"], None if left == -1 else left + 1
        return reference(Stream(query, key, given["value"], borders, 6, given["scale"], window))

    return library(VARLEN[release]["positional"], VARLEN[release]["keyword"], compute)


@pytest.mark.parametrize("release", VARLEN)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_every_release_attends_as_whole_matrices_do(
    release: str, kv_heads: int, window: int | None
) -> None:
    stream = example(kv_heads, window)
    torch.testing.assert_close(varlen_call(varlen(release), stream), reference(stream))


def test_float32_on_a_gpu_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention has no float32."""
    monkeypatch.delattr(attention_kernels, "varlen_call")
    monkeypatch.setattr(attention_kernels, "_per_sequence", lambda stream: stream.query_THD)
    with FakeTensorMode():
        query_THD = torch.empty(5, 4, 8, device="cuda")
        out_THD = packed_attention(Stream(query_THD, query_THD, query_THD, query_THD, 3, 1.0))
    assert out_THD is query_THD


def test_the_installed_release_is_as_recorded() -> None:
    version = torch.__version__.partition("+")[0]
    if version not in VARLEN:
        pytest.skip(f"torch {version} is not recorded")
    parameters = list(inspect.signature(varlen_attn).parameters)
    assert parameters == VARLEN[version]["positional"] + VARLEN[version]["keyword"]

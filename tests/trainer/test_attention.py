"""Tests calls of torch's variable-length attention against the signatures of every recorded
release.

`tests/data/varlen_attn.json` contains the parameters of `varlen_attn` in torch 2.11 to 2.14, read
from the published wheels. The function has no CPU kernel. Therefore a stand-in with the recorded
signature interprets its arguments as torch documents them, and computes with complete score
matrices.
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
    """Compute attention with complete score matrices in float64 and an explicit mask."""
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
    """Return a function with this signature, which refuses other arguments and calls `compute` with
    the bound ones."""
    positionals = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
    keywords = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in keyword]
    signature = inspect.Signature([*positionals, *keywords])

    def attend(*positions: Any, **named: Any) -> Any:
        return compute(signature.bind(*positions, **named).arguments)

    attend.__signature__ = signature  # type: ignore[attr-defined]
    return attend


def varlen(release: str) -> Callable[..., Any]:
    """Return a stand-in of torch's function: causal is a window to the left only, and -1 is an
    unlimited window."""

    def compute(arguments: dict[str, Any]) -> Tensor:
        query, key = arguments["query"], arguments["key"]
        assert query.shape[1] == key.shape[1] or arguments.get("enable_gqa"), (
            "torch checks this too"
        )
        assert (
            arguments["cu_seq_q"] is arguments["cu_seq_k"]
            and arguments["max_q"] == arguments["max_k"] == 6
        )
        left, right = arguments["window_size"]
        assert right == 0
        borders, window = arguments["cu_seq_q"], None if left == -1 else left + 1
        return reference(
            Stream(query, key, arguments["value"], borders, 6, arguments["scale"], window)
        )

    return library(VARLEN[release]["positional"], VARLEN[release]["keyword"], compute)


@pytest.mark.parametrize("release", VARLEN)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_varlen_call_equals_reference_attention_for_every_torch_release(
    release: str, kv_heads: int, window: int | None
) -> None:
    stream = example(kv_heads, window)
    torch.testing.assert_close(varlen_call(varlen(release), stream), reference(stream))


def test_packed_attention_runs_per_sequence_when_gpu_tensors_are_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flash attention does not support float32."""
    monkeypatch.delattr(attention_kernels, "varlen_call")
    monkeypatch.setattr(attention_kernels, "_per_sequence", lambda stream: stream.query_THD)
    with FakeTensorMode():
        query_THD = torch.empty(5, 4, 8, device="cuda")
        out_THD = packed_attention(Stream(query_THD, query_THD, query_THD, query_THD, 3, 1.0))
    assert out_THD is query_THD


def test_installed_varlen_attn_has_the_recorded_signature() -> None:
    version = torch.__version__.partition("+")[0]
    if version not in VARLEN:
        pytest.skip(f"torch {version} is not recorded")
    parameters = list(inspect.signature(varlen_attn).parameters)
    assert parameters == VARLEN[version]["positional"] + VARLEN[version]["keyword"]

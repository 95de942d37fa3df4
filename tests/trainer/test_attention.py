"""Which attention a GPU gets, and how each library is called, in every release that is recorded.

`tests/data/varlen_attn.json` holds the parameters of torch's `varlen_attn` in 2.11 to 2.14, read
from the published wheels; `flash_attn.json` those of `flash_attn_varlen_func`, from its sources
(version 4 as SGLang 0.5.23 carries it).
What has no CPU kernel is a stand-in with the recorded signature: it reads its arguments as the
library documents them, and computes with whole matrices.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from inspect import Parameter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_async.trainer import attention_kernels
from megatron_async.trainer.attention_kernels import (
    PER_SEQUENCE,
    Stream,
    choose_kernel,
    find,
    packed_attention,
)

DATA = Path(__file__).parents[1] / "data"
VARLEN: dict[str, dict[str, list[str]]] = json.loads((DATA / "varlen_attn.json").read_text())
FLASH: dict[str, list[str]] = json.loads((DATA / "flash_attn.json").read_text())
TORCH, FLASH_ATTENTION, FLEX = (
    "torch variable-length flash attention",
    "FlashAttention",
    "torch FlexAttention",
)


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


def flash(version: str) -> Callable[..., Any]:
    """Dao's: a window without end is -1 in versions 2 and 3, None in 4, and is their default."""

    def compute(given: dict[str, Any]) -> Any:
        assert given["cu_seqlens_q"] is given["cu_seqlens_k"] and given["causal"]
        assert given["max_seqlen_q"] == given["max_seqlen_k"] == 6
        size = given.get("window_size")
        assert size is None or size[1] == 0
        window = None if size is None else size[0] + 1
        inputs = (given["q"], given["k"], given["v"], given["cu_seqlens_q"])
        out = reference(Stream(*inputs, 6, given["softmax_scale"], window))
        return out if version == "2.7" else (out, None)

    names = FLASH[version]
    return library(names[:3], names[3:], compute)


def found(name: str, function: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    return {name: function, FLEX: find(FLEX)} if name != FLEX else {name: function}


CASES = [
    *((TORCH, lambda release=release: varlen(release), f"torch {release}") for release in VARLEN),
    *((FLASH_ATTENTION, lambda v=version: flash(v), f"flash {version}") for version in FLASH),
    (FLEX, lambda: find(FLEX), "flex"),
]


@pytest.mark.parametrize(("name", "make", "_id"), CASES, ids=[case[2] for case in CASES])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_every_library_attends_as_whole_matrices_do(
    name: str, make: Callable[[], Any], _id: str, kv_heads: int, window: int | None
) -> None:
    kernel = choose_kernel(found(name, make()).get)
    assert kernel.name == name
    stream = example(kv_heads, window)
    torch.testing.assert_close(kernel.attend(stream), reference(stream))


def test_a_function_without_what_a_layer_needs_is_passed_over() -> None:
    """Torch 2.10 has no window, FlashAttention 2.2 neither."""

    def never(given: dict[str, Any]) -> Any:
        raise AssertionError("not to be called")

    oldest = library(VARLEN["2.11.0"]["positional"], ["is_causal"], never)
    old_flash = library(["q", "k", "v"], ["cu_seqlens_q", "max_seqlen_q", "causal"], never)
    with_flash = {TORCH: oldest, FLASH_ATTENTION: flash("2.7")}
    assert choose_kernel(with_flash.get).name == FLASH_ATTENTION
    assert choose_kernel({TORCH: oldest, FLASH_ATTENTION: old_flash}.get) is PER_SEQUENCE
    assert choose_kernel({}.get) is PER_SEQUENCE


def test_a_library_that_cannot_be_imported_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was found is imported no further: each of these packages is large."""
    tried = []

    def import_module(name: str) -> Any:
        tried.append(name)
        if name == "flash_attn":
            raise AssertionError("built for another torch")
        return SimpleNamespace(flash_attn_varlen_func=flash("2.7"))

    monkeypatch.setattr(attention_kernels.importlib, "import_module", import_module)
    assert find.__wrapped__(FLASH_ATTENTION) is not None
    assert tried == ["flash_attn", "flash_attn_interface"]


def test_float32_on_a_gpu_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention has no float32."""
    monkeypatch.delattr(attention_kernels, "choose_kernel")
    monkeypatch.setattr(attention_kernels, "_per_sequence", lambda stream: stream.query_THD)
    with FakeTensorMode():
        query_THD = torch.empty(5, 4, 8, device="cuda")
        out_THD = packed_attention(Stream(query_THD, query_THD, query_THD, query_THD, 3, 1.0))
    assert out_THD is query_THD


def test_the_installed_release_is_as_recorded() -> None:
    version = torch.__version__.partition("+")[0]
    if version not in VARLEN:
        pytest.skip(f"torch {version} is not recorded")
    parameters = list(inspect.signature(find(TORCH)).parameters)
    assert parameters == VARLEN[version]["positional"] + VARLEN[version]["keyword"]

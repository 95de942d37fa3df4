"""Tests publishing with several trainer ranks: pipeline stages send their own layers in order, and
all ranks learn of a failure at any stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress
from megatron_async.weight_sync.verify import engine_parameter
from tests.distributed import run_ranks
from tests.trainer.cases import settings, trainer_session, write_model
from tests.weight_sync.fake_engine import FakeEngine, serving

pytestmark = pytest.mark.slow

PP2 = {"ranks": 2, "pipeline": 2}
TP2 = {"ranks": 2, "tensor": 2}
DP2 = {"ranks": 2}


def publish(
    model_dir: Path, folder: Path, plan: list[tuple[dict[str, Any], str]], urls: list[str]
) -> list[Any]:
    """Publish one version for each (layout, transport) of `plan`; return the engines that got each
    version, or the error message."""
    from megatron_async.weight_sync.publisher import WeightPublisher

    engines = [EngineAddress(f"engine{i}", url) for i, url in enumerate(urls)]
    found: list[Any] = []
    for number, (layout, transport) in enumerate(plan):
        config = settings(
            model_dir,
            {
                "parallel": layout,
                "weights": {"transport": transport, "bucket_mib": 1, "timeout_seconds": 30},
            },
        )
        with trainer_session(config) as trainer:
            publisher = WeightPublisher(config, trainer.model, folder / f"{number}")
            try:
                found.append(publisher.publish(engines, PolicyVersion(0, number)))
            except ComponentFailure as error:
                found.append(str(error))
            publisher.close()
    return found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engines(model_dir: Path) -> Iterator[tuple[list[FakeEngine], list[str]]]:
    known = {engine_parameter(name) for name in load_file(model_dir / "model.safetensors")}
    both = [FakeEngine("works", known) for _ in range(2)]
    with ExitStack() as stack:
        yield both, [stack.enter_context(serving(engine, "")).url for engine in both]


def test_every_layout_and_transport_delivers_every_tensor_bit_identically(
    model_dir: Path, tmp_path: Path, engines: tuple[list[FakeEngine], list[str]]
) -> None:
    from megatron_async.weight_sync.receiver import WeightReceiver

    both, urls = engines
    expected = load_file(model_dir / "model.safetensors")
    expected.pop("lm_head.weight", None)
    for index, engine in enumerate(both):
        engine.receiver = WeightReceiver(tmp_path / f"stored{index}")
    loaded: list[dict[str, torch.Tensor]] = []
    plan = [
        (layout, transport)
        for layout in (PP2, TP2, DP2)
        for transport in ("distributed", "tensor", "disk", "delta")
    ]

    for engine in both:
        engine.after_version = lambda engine=engine: (
            loaded.append(engine.loaded),
            setattr(engine, "loaded", {}),
        )
    found = run_ranks(publish, 2, model_dir, tmp_path, plan, urls, timeout_seconds=150)
    assert found[0] == found[1] == [["engine0", "engine1"]] * len(plan)
    assert len(loaded) == 2 * len(plan)
    for number, (_, transport) in enumerate(plan):
        for tensors in loaded[2 * number : 2 * number + 2]:
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                wanted = expected[name]
                if transport == "delta":
                    wanted = wanted.to(torch.bfloat16)
                assert torch.equal(tensor, wanted), (number, name)


def test_each_pipeline_stage_sends_its_layers_over_its_own_group(
    model_dir: Path, tmp_path: Path, engines: tuple[list[FakeEngine], list[str]]
) -> None:
    both, urls = engines
    run_ranks(publish, 2, model_dir, tmp_path, [(PP2, "distributed")], urls, timeout_seconds=60)
    for engine in both:
        assert [call for call in engine.calls if "layers.0." in " ".join(call[1])]
        groups = list(dict.fromkeys(group for group, _ in engine.calls))
        assert len(groups) == 2, "one group for each stage, in order"
        by_group = {
            group: {name for g, names in engine.calls if g == group for name in names}
            for group in groups
        }
        first, second = (by_group[group] for group in groups)
        assert "model.embed_tokens.weight" in first and "model.norm.weight" in second
        assert all(".layers.1." not in name for name in first)
        assert all(".layers.0." not in name for name in second)


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
@pytest.mark.parametrize("refused", ["model.embed_tokens.weight", "model.norm.weight"])
def test_all_ranks_exclude_an_engine_that_fails_at_any_pipeline_stage(
    model_dir: Path,
    tmp_path: Path,
    engines: tuple[list[FakeEngine], list[str]],
    transport: str,
    refused: str,
) -> None:
    both, urls = engines
    both[1].refuses = refused
    found = run_ranks(publish, 2, model_dir, tmp_path, [(PP2, transport)], urls, timeout_seconds=90)
    assert found == [[["engine0"]], [["engine0"]]]
    assert both[0].version == "0.0"
    assert both[0].loaded.keys() >= {"model.embed_tokens.weight", "model.norm.weight"}

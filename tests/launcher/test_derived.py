"""Settings derived from machine and model: a cluster's where nobody set them, a laptop's as are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, build_config, load_config
from megatron_async.errors import UserError
from megatron_async.launcher.derived import Machine, check_memory, derive, layout_lines

ROOT = Path(__file__).parents[2]
H100 = Machine("cuda", "H100", 80e9, cores=192)
LAPTOP = Machine("cpu", cores=2)


def run_with(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {"model": {"path": "Qwen2.5-7B"}, "engines": {"count": 4}}
    return build_config({**base, "algorithm": {"recipe": "pipeline_rl"}, **sections})


def value_of(name: str, config: RunConfig, machine: Machine) -> Any:
    [found] = [one for one in derive(config, machine).settings if one.name == name]
    section, field = name.split(".")
    assert getattr(getattr(derive(config, machine).config, section), field) == found.value
    return found.value


def test_on_a_cpu_nothing_changes() -> None:
    config = run_with()
    derived = derive(config, LAPTOP)
    assert derived.config == config and derived.changes() == []


def test_on_gpus_no_default_of_a_laptop_is_left() -> None:
    config = run_with()
    assert value_of("engines.max_total_tokens", config, H100) is None
    assert value_of("task.scorer_workers", config, H100) == 96
    assert value_of("engines.start_timeout_seconds", config, H100) == 1200
    concurrency = value_of("schedule.concurrency", config, H100)
    assert concurrency > 4 * config.schedule.concurrency
    graphs = value_of("engines.cuda_graph_batch", config, H100)
    assert concurrency / 4 <= graphs < concurrency / 4 + 8


def test_a_smaller_gpu_recomputes_more_layers() -> None:
    config = run_with(parallel={"ranks": 8, "tensor": 2}, trainer={"microbatch_tokens": 20480})
    layers = value_of("trainer.recompute", config, H100)
    assert isinstance(layers, int) and layers > 0
    assert value_of("trainer.recompute", config, Machine("cuda", "H200", 141e9)) == "none"
    assert value_of("trainer.recompute", config, Machine("cuda", "A100", 40e9)) == "all"
    shared = {"placement": "colocated", "count": 8}
    colocated = config.with_section("engines", **shared)
    more = value_of("trainer.recompute", colocated, H100)
    assert isinstance(more, int) and more > layers, "a paused engine keeps some memory"


@pytest.mark.parametrize(
    ("section", "given"),
    [
        ("engines", {"max_total_tokens": 65536, "cuda_graph_batch": 64}),
        ("engines", {"start_timeout_seconds": 240.0}),
        ("schedule", {"concurrency": 64}),
        ("task", {"scorer_workers": 8}),
        ("trainer", {"recompute": "all"}),
    ],
)
def test_what_is_set_stays_even_at_the_default(section: str, given: dict[str, Any]) -> None:
    derived = derive(run_with(**{section: given}), H100)
    for field, value in given.items():
        assert getattr(getattr(derived.config, section), field) == value
        assert (
            f"{section}.{field} = {value}: set by a file, the command line, the recipe or "
            "the preset" in derived.lines()
        )


def test_what_was_derived_is_kept_when_the_run_is_resumed_elsewhere(tmp_path: Path) -> None:
    from megatron_async.config.load import dump

    first = derive(run_with(), H100).config
    (tmp_path / "config.yaml").write_text(dump(first))
    resumed = load_config(tmp_path / "config.yaml")
    assert derive(resumed, LAPTOP).config == resumed == first


def test_an_unknown_shape_is_the_reason_for_the_default() -> None:
    config = build_config({"algorithm": {"recipe": "pipeline_rl"}})
    derived = derive(config, H100)
    assert derived.config.schedule.concurrency == config.schedule.concurrency
    assert any("shape is unknown" in line for line in derived.lines())


@pytest.mark.parametrize(
    "argument", [["--mem-fraction-static", "0.95"], ["--mem-fraction-static=0.95"]]
)
def test_a_share_of_memory_that_leaves_no_room_for_an_update_is_refused(
    argument: list[str],
) -> None:
    """The head (2.1 GB), a bucket (0.5 GB) and a group for each of two stages (1.1 GB each)."""
    config = load_config(ROOT / "configs" / "llama3.3-70b.yaml")
    raised = config.engines.model_copy(update={"extra_args": argument})
    with pytest.raises(UserError, match=r"leaves 4\.0 GB .* a weight update needs 4\.8 GB"):
        check_memory(config.model_copy(update={"engines": raised}), H100)
    lower = config.engines.model_copy(update={"extra_args": ["--mem-fraction-static", "0.9"]})
    check_memory(config.model_copy(update={"engines": lower}), H100)
    check_memory(config, H100)
    assert "a weight update 4.8 GB" in "\n".join(layout_lines(config, H100))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "parallel={tensor: 2, pipeline: 1}",
            r"tensor 2 x parallel.pipeline 1: a trainer's state .* 220",
        ),
        ("engines.tensor=1", r"engines\.tensor 1: an engine's weights would need 141\.1 GB"),
    ],
)
def test_weights_that_no_gpu_can_hold_are_refused(override: str, sentence: str) -> None:
    config = load_config(ROOT / "configs" / "llama3.3-70b.yaml", [override])
    with pytest.raises(UserError, match=sentence):
        check_memory(config, H100)
    check_memory(config, Machine("cuda", "H200", 400e9, cores=192))
    check_memory(config, LAPTOP)


@pytest.mark.parametrize(("tokens", "over"), [(20_480, False), (400_000, True)])
def test_an_estimated_peak_above_the_memory_is_called_that(tokens: int, over: bool) -> None:
    overrides = [f"trainer.microbatch_tokens={tokens}", "trainer.recompute=all"]
    config = load_config(ROOT / "configs" / "llama3.3-70b.yaml", overrides)
    shown = "\n".join(layout_lines(config, H100))
    assert (" of 80 GB, which is too much: raise trainer.recompute, up to all" in shown) == over

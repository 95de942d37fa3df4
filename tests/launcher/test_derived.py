"""Tests settings that are derived from the machine and the model: GPU machines get derived values
for settings that the user has not set; a laptop keeps the defaults."""

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
    [found] = [setting for setting in derive(config, machine).settings if setting.name == name]
    section, field = name.split(".")
    assert getattr(getattr(derive(config, machine).config, section), field) == found.value
    return found.value


def test_derive_changes_no_setting_when_the_machine_has_no_gpu() -> None:
    config = run_with()
    derived = derive(config, LAPTOP)
    assert derived.config == config and derived.changes() == []


def test_derive_replaces_laptop_defaults_when_the_machine_has_gpus() -> None:
    config = run_with()
    assert value_of("engines.max_total_tokens", config, H100) is None
    assert value_of("task.scorer_workers", config, H100) == 96
    assert value_of("engines.start_timeout_seconds", config, H100) == 1200
    concurrency = value_of("schedule.concurrency", config, H100)
    assert concurrency > 4 * config.schedule.concurrency
    graphs = value_of("engines.cuda_graph_batch", config, H100)
    assert concurrency / 4 <= graphs < concurrency / 4 + 8


def test_derived_recompute_grows_when_a_gpu_has_less_memory() -> None:
    config = run_with(parallel={"ranks": 8, "tensor": 2}, trainer={"microbatch_tokens": 20480})
    layers = value_of("trainer.recompute", config, H100)
    assert isinstance(layers, int) and layers > 0
    assert value_of("trainer.recompute", config, Machine("cuda", "H200", 141e9)) == "none"
    assert value_of("trainer.recompute", config, Machine("cuda", "A100", 40e9)) == "all"
    shared = {"placement": "colocated", "count": 8}
    colocated = config.with_section("engines", **shared)
    colocated_layers = value_of("trainer.recompute", colocated, H100)
    assert isinstance(colocated_layers, int) and colocated_layers > layers, (
        "a paused engine keeps some memory"
    )


@pytest.mark.parametrize(
    ("section", "explicit"),
    [
        ("engines", {"max_total_tokens": 65536, "cuda_graph_batch": 64}),
        ("engines", {"start_timeout_seconds": 240.0}),
        ("schedule", {"concurrency": 64}),
        ("task", {"scorer_workers": 8}),
        ("trainer", {"recompute": "all"}),
    ],
)
def test_derive_keeps_explicit_setting_even_when_equal_to_its_default(
    section: str, explicit: dict[str, Any]
) -> None:
    derived = derive(run_with(**{section: explicit}), H100)
    for field, value in explicit.items():
        assert getattr(getattr(derived.config, section), field) == value
        assert (
            f"{section}.{field} = {value}: set by a file, the command line, the recipe or "
            "the preset" in derived.lines()
        )


def test_derived_settings_stay_when_the_run_is_resumed_on_another_machine(tmp_path: Path) -> None:
    from megatron_async.config.load import dump

    first = derive(run_with(), H100).config
    (tmp_path / "config.yaml").write_text(dump(first))
    resumed = load_config(tmp_path / "config.yaml")
    assert derive(resumed, LAPTOP).config == resumed == first


def test_derive_keeps_default_concurrency_when_the_model_shape_is_unknown() -> None:
    config = build_config({"algorithm": {"recipe": "pipeline_rl"}})
    derived = derive(config, H100)
    assert derived.config.schedule.concurrency == config.schedule.concurrency
    assert any("shape is unknown" in line for line in derived.lines())


@pytest.mark.parametrize(
    "argument", [["--mem-fraction-static", "0.95"], ["--mem-fraction-static=0.95"]]
)
def test_check_memory_refuses_mem_fraction_without_memory_for_an_update(
    argument: list[str],
) -> None:
    """An update needs the head (2.1 GB), a bucket (0.5 GB) and a group for each of two stages (1.1
    GB each)."""
    config = load_config(ROOT / "configs" / "llama3.3-70b.yaml")
    raised = config.engines.model_copy(update={"extra_args": argument})
    with pytest.raises(UserError, match=r"leaves 4\.0 GB .* a weight update needs 4\.8 GB"):
        check_memory(config.model_copy(update={"engines": raised}), H100)
    lower = config.engines.model_copy(update={"extra_args": ["--mem-fraction-static", "0.9"]})
    check_memory(config.model_copy(update={"engines": lower}), H100)
    check_memory(config, H100)
    assert "a weight update 4.8 GB" in "\n".join(layout_lines(config, H100))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "parallel={tensor: 2, pipeline: 1}",
            r"tensor 2 x parallel.pipeline 1: a trainer's state .* 220",
        ),
        ("engines.tensor=1", r"engines\.tensor 1: an engine's weights would need 141\.1 GB"),
    ],
)
def test_check_memory_refuses_layout_when_weights_exceed_gpu_memory(
    override: str, message: str
) -> None:
    config = load_config(ROOT / "configs" / "llama3.3-70b.yaml", [override])
    with pytest.raises(UserError, match=message):
        check_memory(config, H100)
    check_memory(config, Machine("cuda", "H200", 400e9, cores=192))
    check_memory(config, LAPTOP)


@pytest.mark.parametrize(("tokens", "exceeds"), [(20_480, False), (400_000, True)])
def test_layout_lines_warn_when_estimated_peak_exceeds_gpu_memory(
    tokens: int, exceeds: bool
) -> None:
    overrides = [f"trainer.microbatch_tokens={tokens}", "trainer.recompute=all"]
    config = load_config(ROOT / "configs" / "llama3.3-70b.yaml", overrides)
    shown = "\n".join(layout_lines(config, H100))
    assert (" of 80 GB, which is too much: raise trainer.recompute, up to all" in shown) == exceeds

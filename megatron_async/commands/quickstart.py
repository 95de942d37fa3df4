"""`megatron-async quickstart`: builds a small model, fine-tunes it, trains it by RL, and evaluates
it.

Every stage uses the same code as a large run (`run_sft`, `evaluate_checkpoints`, `supervise`); this
module only calls the stages one after the other and measures their times.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console

from megatron_async.commands.evaluation import evaluate_checkpoints
from megatron_async.commands.report import closing_table, where_things_are, write_report
from megatron_async.commands.sft import run_sft
from megatron_async.config import RunConfig
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.devices import DeviceSplit, split_of_this_machine
from megatron_async.launcher.preflight import check_one_machine, check_probe_tolerance, check_run
from megatron_async.launcher.run_lock import new_run
from megatron_async.launcher.supervisor import supervise
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.summary import summarize

# Number of prompts of the evaluation before fine-tuning. A few are enough to show that a model with
# random weights gives no right answer, and each takes long, because its response has the maximal
# length.
_PROMPTS_BEFORE_SFT = 64


def quick_dtype(config: RunConfig) -> str:
    """Return the data type for the quickstart's fine-tuning: bfloat16 if `model.dtype` is auto,
    there is no GPU, and this CPU has instructions for products of bfloat16; else `model.dtype`.

    On such a CPU, bfloat16 is about twice as fast as float32, which `auto` would mean.
    """
    found = torch.cpu.get_capabilities()
    quick = found.get("avx512_bf16", False) or found.get("amx_bf16", False)
    on_cpu = config.model.dtype == "auto" and not torch.cuda.is_available()
    return "bfloat16" if quick and on_cpu else config.model.dtype


def quickstart(config: RunConfig) -> None:
    """Run all stages of the quickstart in one new run directory.

    Raises:
        UserError: Bad input.
        ComponentFailure: A stage failed.
    """
    check_one_machine(config)
    check_probe_tolerance(config)
    config = derive(config, Machine.here(config)).config
    devices = split_of_this_machine(config)
    with new_run(config, "megatron-async quickstart") as directory:
        _run_in(directory, config, devices)


def _run_in(directory: RunDirectory, config: RunConfig, devices: DeviceSplit) -> None:
    console = Console(soft_wrap=True)
    initial, tuned = directory.path / "model", directory.path / "sft"
    phases: list[tuple[str, float]] = []

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        phases.append((name, time.monotonic() - began))

    console.print(f"1/4 building the model in {initial}")
    build_tiny_model(initial, seed=config.seed)
    check_run(config.with_section("model", path=str(initial)))
    console.print("2/4 held-out accuracy before fine-tuning")
    with timed("evaluation before SFT, including the engine's start"):
        prompts = min(_PROMPTS_BEFORE_SFT, config.eval.prompts)
        few = config.with_section("eval", prompts=prompts)
        (before,) = evaluate_checkpoints(few, [initial], directory.logs, lambda *_: None)
    console.print(f"  {before.results[0].message()}", highlight=False)
    console.print("3/4 supervised fine-tuning on worked answers")
    with timed("SFT"):
        sft = config.with_section("model", path=str(initial), dtype=quick_dtype(config))
        directory.save_config(sft)
        run_sft(sft, directory, tuned)
    console.print("4/4 reinforcement learning")
    rl = config.with_section("model", path=str(tuned))
    directory.save_config(rl)
    with timed("RL in total, including the start of engine and trainers"):
        supervise(rl, directory, devices)
    summary = summarize(directory)
    console.print(
        closing_table(summary, directory, before_sft=before.results[0], extra_phases=phases)
    )
    console.print(where_things_are(directory), highlight=False)
    page = write_report([directory.path], None)
    console.print(f"report       {page} (open it in a browser)", highlight=False)

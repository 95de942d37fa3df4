"""Checks before any process starts: a missing model, an impossible layout, a bad task.

Invariants
- Every refusal is a `UserError` of one sentence that names the remedy.
- `train` and `launch` (also `--dry-run`), `doctor --config`, `sft` and `eval` make the same checks;
  `settings --of` shows what they find. What may be mended is a default, never a value that was set;
  a notice names it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_async.checkpoint.manifest import (
    MANIFEST_NAME,
    check_manifests,
    is_checkpoint,
    list_checkpoints,
    open_checkpoint,
)
from megatron_async.config import RunConfig
from megatron_async.config.files import TOKENIZER_FILES, tokenizer_digest
from megatron_async.config.recipes import RECIPES
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.nodes import is_loopback
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.models.architecture import Architecture, read_config_json
from megatron_async.run_directory import RunDirectory
from megatron_async.runtime.import_path import is_import_path
from megatron_async.simulate.recomputation import check_recompute
from megatron_async.tasks.data_identity import data_changes, data_identity

# bfloat16 keeps eight bits: a log-prob of -5 is rounded by up to 0.016.
_LEAST_TOLERANCE_OF_BFLOAT16 = 1e-3


@dataclass(frozen=True)
class PreflightResult:
    """Settings that can start, and one sentence for each default that had to give way.

    `summary`: what there is to train on, and what the templates made of the first prompt.
    """

    config: RunConfig
    notices: tuple[str, ...] = ()
    summary: str = ""


def check_model(path: Path | str, *, tokenizer: bool = True) -> None:
    """Check that a Hugging Face directory has undamaged weights and, if asked, a tokenizer."""
    from megatron_async.models.model_files import SafetensorsDirectory

    read_config_json(path)
    directory = Path(path)
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"model.path {path} holds no *.safetensors weights")
    if tokenizer and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"model.path {path} holds no tokenizer: copy tokenizer.json and tokenizer_config.json "
            "of the same model into it"
        )
    with SafetensorsDirectory(path, framework="np") as weights:
        weights.open_all()


def check_served(path: Path | str) -> None:
    """Check a model that an engine alone will have, of whatever family. Raises UserError."""
    from megatron_async.models.model_files import check_weights

    check_model(path)
    check_weights(path, None)


def check_engines(engines: EngineConfig) -> None:
    """Check that other hosts reach engines only with a key: a client can change weights."""
    if not (is_loopback(engines.host) or engines.api_key):
        raise UserError(
            f"engines.host is {engines.host!r}, which other hosts can reach, and engines.api_key "
            "is empty; set a key, or leave engines.host at 127.0.0.1"
        )


def check_one_machine(config: RunConfig) -> None:
    """Check that a command which starts all ranks here may run `config`. Raises UserError."""
    if config.parallel.nodes > 1:
        raise UserError(
            f"parallel.nodes is {config.parallel.nodes}, and this command uses one machine; "
            "`megatron-async launch` (sft: launch/slurm/sft.sbatch) starts it on several"
        )


def check_probe_tolerance(config: RunConfig, device: str | None = None) -> None:
    """Check that engines on this machine can agree with the trainer as closely as is asked.

    Those that do not are replaced until none is left, minutes after the start. `device`: what
    `auto` means there; None: what this host has.
    """
    from megatron_async.engines.sglang.process import resolve_device, resolve_dtype

    weights, engines = config.weights, config.engines
    if device is None or engines.device != "auto" or engines.kind == "simulated":
        device = resolve_device(engines)
    dtype = resolve_dtype(engines, device)
    tolerance = weights.probe_tolerance
    if tolerance is None or weights.verify == "never" or dtype == "float32":
        return
    if tolerance < _LEAST_TOLERANCE_OF_BFLOAT16:
        raise UserError(
            f"weights.probe_tolerance is {tolerance:g}, which takes float32, and engines.dtype "
            f"{engines.dtype} is {dtype} here: leave weights.probe_tolerance out, or set "
            "engines.dtype and model.dtype float32"
        )


def check_store(config: RunConfig, directory: RunDirectory) -> None:
    """Check, where the rollout manager runs, that the trajectory store has a disk for it."""
    from megatron_async.store.location import check_location, location_of_writer

    check_location(location_of_writer(directory.store_file, config.store.directory))


def _check_checkpoint(path: Path, architecture: Architecture) -> None:
    """Check its manifest; the files are verified when they are read."""
    from megatron_async.checkpoint.placement import incompatibility

    if not is_checkpoint(path):
        raise UserError(f"model.checkpoint {str(path)!r} has no {MANIFEST_NAME}: not a checkpoint")
    checkpoint = open_checkpoint(path, "model.checkpoint", lambda _: [])
    if fault := incompatibility(checkpoint.manifest, architecture, None):
        raise UserError(f"model.checkpoint {path} does not fit the model of model.path: {fault}")


def check_resume(directory: RunDirectory, config: RunConfig, from_step: int | None = None) -> None:
    """Refuse what a run left that cannot be gone on from. Raises UserError.

    Checkpoints of another version's format or another optimizer, a damaged manifest of what may be
    the newest (which going back to `from_step` sets aside), a lost number of the lineage.
    """
    directory.lineages_so_far()
    if from_step is None:
        check_manifests(directory.checkpoints)
    for checkpoint in list_checkpoints(directory.checkpoints)[:1]:
        name, saved = config.optimizer.name, checkpoint.manifest.optimizer
        if saved not in (None, name):
            raise UserError(
                f"optimizer.name is {name!r}, and {checkpoint.path} holds the state of {saved!r}: "
                "leave it as it was, or start a new run from these weights with "
                f"model.checkpoint={checkpoint.path}"
            )


def check_same_run(
    directory: RunDirectory, before: RunConfig, config: RunConfig
) -> tuple[str, ...]:
    """Refuse a resume that changes the run's directory, model, weights or data.

    Returns notices of data files that have changed and that task.changed_data accepts. Raises
    UserError.
    """
    if RunDirectory.of(config) not in (RunDirectory.of(before), directory):
        key, value = ("name", config.name) if config.name != before.name else ("root", config.root)
        raise UserError(
            f"{key} is {value!r}, and the run of {directory.path} stays where it is: leave it out, "
            "or rename the directory and resume that"
        )
    own = next(iter(list_checkpoints(directory.checkpoints)), None)
    if own and config.model.checkpoint not in ("", before.model.checkpoint):
        raise UserError(
            f"model.checkpoint is {config.model.checkpoint!r}, and {directory.path} goes on from "
            f"its own checkpoint {own.path.name}: leave it out, or start a new run under another "
            "name"
        )
    for difference in _differences(directory, before, config):
        raise UserError(
            f"model.path is {config.model.path!r}, and {directory.path} is a run of another model: "
            f"{difference}; resume it with the model that it began with (model.path was "
            f"{before.model.path!r}), or start a new run under another name"
        )
    known = directory.data_identity()
    changes = data_changes(known, data_identity(config, known))
    if changes and config.task.changed_data == "refuse":
        raise UserError(
            f"the data are not those that {directory.path} began with: {'; '.join(changes)}. Its "
            "position in the data, its held-out problems and its accuracies belong to the former "
            "files: restore them, go on with the new ones by task.changed_data=accept, or start a "
            "new run"
        )
    return tuple(f"the data have changed (task.changed_data accept): {one}" for one in changes)


def _differences(directory: RunDirectory, before: RunConfig, config: RunConfig) -> Iterator[str]:
    """Compare with the newest checkpoint, with the tokenizer that the run noted at its start, and
    with the model that it had where that is."""
    from megatron_async.checkpoint.placement import incompatibility
    from megatron_async.models.families import read_architecture

    old, new = before.model, config.model
    architecture = read_architecture(new.path, new.family)
    for checkpoint in list_checkpoints(directory.checkpoints)[:1]:
        if fault := incompatibility(checkpoint.manifest, architecture, config.optimizer.name):
            yield f"{checkpoint.path}: {fault}"
    if old != new and (Path(old.path) / "config.json").is_file():
        now = asdict(architecture)
        for name, was in asdict(read_architecture(old.path, old.family)).items():
            if was != now[name] and name != "dtype":
                yield f"its {name} is {was}, and the other's is {now[name]}"
    tokenizer = directory.tokenizer_digest() or tokenizer_digest(old.path)
    if tokenizer and tokenizer != tokenizer_digest(new.path):
        yield "its tokenizer or its chat template is another"


def check_policy(config: RunConfig, *, tokenizer: bool = True) -> Architecture:
    """Check the model, its weights and their layout over the trainer's ranks."""
    from megatron_async.models.families import read_architecture
    from megatron_async.models.layout import check_layout
    from megatron_async.models.model_files import check_weights

    architecture = read_architecture(config.model.path, config.model.family)
    check_layout(architecture, config.parallel)
    stages = config.parallel.pipeline
    check_recompute(config.trainer.recompute, architecture.num_layers // stages, stages)
    check_model(config.model.path, tokenizer=tokenizer)
    if config.model.checkpoint:
        _check_checkpoint(Path(config.model.checkpoint), architecture)
    check_weights(config.model.path, architecture)
    return architecture


def check_run(config: RunConfig, *, generates: bool = True) -> PreflightResult:
    """Model, weights, the parallel layout, engines and task, without starting anything.

    `generates`: engines will be asked for responses to the task's prompts; else worked answers are
    trained on.
    """
    from megatron_async.models.layout import check_engine_layout
    from megatron_async.telemetry.trackers.build import build_trackers

    check_engines(config.engines)
    if is_import_path(config.algorithm.loss.name):  # only then is torch needed here
        from megatron_async.algorithms.own_loss import check_own_loss

        check_own_loss(config.algorithm)
    build_trackers(config.telemetry)
    architecture = check_policy(config)
    if generates and "--enable-dp-attention" not in config.engines.extra_args:
        check_engine_layout(architecture, config.engines.tensor)
    if config.engines.quantization == "fp8":
        if config.model.family:
            raise UserError(
                f"model.family is {config.model.family!r}, and engines.quantization fp8 has our "
                "own families only; set engines.quantization none"
            )
        from megatron_async.engines.sglang.process import resolve_device
        from megatron_async.weight_sync.quantize import check_fp8

        check_fp8(architecture, config.engines, resolve_device(config.engines))
    return _check_task(config) if generates else _check_worked_answers(config)


def check_run_leniently(config: RunConfig) -> PreflightResult:
    """Check the run as `check_run` does; a refusal, which only a start must heed, is a notice."""
    try:
        return check_run(config)
    except (UserError, ComponentFailure) as error:
        return PreflightResult(config, (f"train refuses this: {error}",))


def check_evaluation(config: RunConfig, model_path: Path) -> PreflightResult:
    """The checkpoint, and the task with its tokenizer, without starting anything."""
    check_served(model_path)
    return _check_task(config.with_section("model", path=str(model_path)), trains=False)


def _check_task(config: RunConfig, *, trains: bool = True) -> PreflightResult:
    """Prompts against the engines' limits, and their number against what is asked for."""
    from megatron_async.rollout.prompt_lengths import max_sequence_tokens
    from megatron_async.scoring.rewards.check import TRIED_ROWS, check_rewards
    from megatron_async.tasks import build_task

    task = build_task(config.task, config.model.path, config.eval, has_episodes=config.has_episodes)
    payloads = [prompt.payload for prompt in task.train_prompts(0, TRIED_ROWS)]
    untried = check_rewards(config.scorers, *payloads) if config.scores else ()
    longest, left_out = max_sequence_tokens(config), 0
    if longest is not None:
        _check_room(config, longest)
        left_out = task.check_lengths(longest, config.sampling.max_new_tokens)
    played = _played(config, payloads[0], longest)
    training, heldout = task.counts(config.eval.prompts)
    groups = config.schedule.groups_per_batch
    if trains and training is not None and groups > training:
        raise UserError(
            f"schedule.groups_per_batch is {groups}, and task.path {config.task.path} has "
            f"{training} training problems (the rest are held out, task.heldout_share "
            f"{config.task.heldout_share:g}): a batch would hold a problem twice; lower "
            "schedule.groups_per_batch or add problems"
        )
    checked = PreflightResult(config)
    if config.task.heldout_share:
        checked = _with_heldout(config, heldout)
    for one in checked.config.eval_sets():
        most = None if longest is None else longest - one.sampling.max_new_tokens
        task.check_evaluation(one.prompts, one.name, most)
    more = ""
    if left_out:
        more = f"\nleft out as too long (task.long_prompts: filter): {left_out:,}"
    return replace(
        checked,
        summary=task.summary() + more + played.summary,
        notices=(*checked.notices, *_other_recipe(config), *untried, *played.notices),
    )


def _other_recipe(config: RunConfig) -> Iterator[str]:
    """Yield a notice where only the schedule was chosen and the default recipe is for another."""
    recipe, preset = config.algorithm.recipe, config.schedule.preset
    chosen = "preset" in config.explicit.get("schedule", {})
    named = "recipe" in config.explicit.get("algorithm", {})
    presets = {name: its.get("schedule", {}).get("preset") for name, its in RECIPES.items()}
    if chosen and not named and presets[recipe] != preset:
        others = [name for name, its in presets.items() if its == preset]
        yield (
            f"schedule.preset is {preset}, and algorithm.recipe keeps its default {recipe}: "
            f"advantage, loss and correction are those of {recipe}. Recipes for this schedule: "
            f"{', '.join(others)}"
        )


def _played(config: RunConfig, payload: Mapping[str, Any], longest: int | None) -> PreflightResult:
    """An episode, where trajectories are some."""
    if not config.has_episodes:
        return PreflightResult(config)
    from megatron_async.environments.check import check_environment

    found = check_environment(config, payload, longest)
    return PreflightResult(config, found.notices, f"\n{found.summary}")


def _check_room(config: RunConfig, longest: int) -> None:
    new = config.sampling.max_new_tokens
    if new >= longest:
        raise UserError(
            f"sampling.max_new_tokens is {new}, and an engine takes {longest} tokens of prompt and "
            "response together (engines.context_length, else the model's; "
            "engines.max_total_tokens): no prompt fits; lower the first or raise the others"
        )


def _with_heldout(config: RunConfig, heldout: int) -> PreflightResult:
    """Fewer held-out problems than the default are all asked; than a number that was set, not."""
    wanted, share = config.eval.prompts, config.task.heldout_share
    if heldout >= wanted:
        return PreflightResult(config)
    has = f"the task has {heldout} held-out problems (task.heldout_share {share:g})"
    if heldout == 0 or "prompts" in config.eval.model_fields_set:
        raise UserError(
            f"eval.prompts is {wanted}, and {has}, equal prompts being one; lower eval.prompts, "
            "raise task.heldout_share, add problems, or hold none out (task.heldout_share 0)"
        )
    return PreflightResult(
        config.with_section("eval", prompts=heldout),
        (f"eval.prompts is {heldout} instead of its default {wanted}: {has}",),
    )


def _check_worked_answers(config: RunConfig) -> PreflightResult:
    from megatron_async.tasks import build_task

    task = build_task(config.task, config.model.path, config.eval)
    size, wanted = config.sft.batch_sequences, config.sft.examples
    if not config.sft.data:  # those are made, and of a file every row is looked at
        wanted = min(size, wanted)
    found = len(task.worked_examples(wanted, config.sft.file()))
    if found < size:
        source = f"sft.data {config.sft.data} has" if config.sft.data else "sft.examples is"
        raise UserError(
            f"sft.batch_sequences is {size}, and {source} {found}: a batch would be larger than "
            "the data; lower sft.batch_sequences"
        )
    if config.sft.data:
        config = config.with_section("sft", examples=found)
    return PreflightResult(config, summary=f"{found:,} examples of {config.sft.data or 'the task'}")

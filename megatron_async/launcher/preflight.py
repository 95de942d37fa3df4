"""Checks a run before its processes start, and refuses it for example if the model is missing, the
layout is impossible or the task is invalid.

The checks start processes only to try rewards and to play one episode. These processes end with the
check.

Invariants
- Every refusal is a `UserError` whose message names the remedy.
- `train` and `launch` (also with `--dry-run`), `doctor --config`, `sft` and `eval` use these
  checks; `settings --of` shows their findings.
- A check may replace a default, and a notice names the replacement. It never replaces a value that
  the user has set.
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

# With bfloat16, which has eight significant bits, rounding changes a log-prob of -5 by up to 0.016.
# A mean difference below this tolerance is therefore not to be expected.
_MIN_TOLERANCE_OF_BFLOAT16 = 1e-3


@dataclass(frozen=True)
class PreflightResult:
    """Settings that passed the checks.

    Attributes:
        config: The settings, with defaults replaced where necessary.
        notices: A message for each replaced default and each other finding.
        summary: Description of the training data and of the first prompt as the chat template
            renders it.
    """

    config: RunConfig
    notices: tuple[str, ...] = ()
    summary: str = ""


def check_model(path: Path | str, *, tokenizer: bool = True) -> None:
    """Raise UserError unless a Hugging Face directory has intact weights and, if asked, a
    tokenizer."""
    from megatron_async.models.model_files import SafetensorsDirectory

    read_config_json(path)
    directory = Path(path)
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"model.path is {path}, which contains no *.safetensors weights")
    if tokenizer and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"model.path is {path}, which contains no tokenizer. Copy tokenizer.json and "
            "tokenizer_config.json of the same model into it."
        )
    with SafetensorsDirectory(path, framework="np") as weights:
        weights.open_all()


def check_served(path: Path | str) -> None:
    """Raise UserError unless the directory `path` has intact weights and a tokenizer, so that an
    engine can load it. Its family need not be one that the trainer supports."""
    from megatron_async.models.model_files import check_weights

    check_model(path)
    check_weights(path, None)


def check_engines(engines: EngineConfig) -> None:
    """Raise UserError if other hosts can reach the engines without an API key.

    This is refused because every client of an engine can change the engine's weights.
    """
    if not (is_loopback(engines.host) or engines.api_key):
        raise UserError(
            f"engines.host is {engines.host!r}, which other hosts can reach, and engines.api_key "
            "is empty. Set a key, or leave engines.host at 127.0.0.1."
        )


def check_one_machine(config: RunConfig) -> None:
    """Raise UserError if `config` needs several nodes, for commands that start all ranks on this
    machine."""
    if config.parallel.nodes > 1:
        raise UserError(
            f"parallel.nodes is {config.parallel.nodes}, but this command uses one machine. "
            "`megatron-async launch` (sft: launch/slurm/sft.sbatch) starts a run on several."
        )


def check_probe_tolerance(config: RunConfig, device: str | None = None) -> None:
    """Raise UserError if `weights.probe_tolerance` is too strict for the engines' precision.

    A run restarts an engine whose log-probs differ from the trainer's by more than the tolerance.
    If rounding alone causes a larger difference, every restart fails too, and the run ends after
    minutes.

    Args:
        config: The run's settings.
        device: Kind of device (`cuda` or `cpu`) that `engines.device: auto` selects on the nodes of
            the engines; None if the engines run on this host, where it is detected.
    """
    from megatron_async.engines.sglang.process import resolve_device, resolve_dtype

    weights, engines = config.weights, config.engines
    if device is None or engines.device != "auto" or engines.kind == "simulated":
        device = resolve_device(engines)
    dtype = resolve_dtype(engines, device)
    tolerance = weights.probe_tolerance
    if tolerance is None or weights.verify == "never" or dtype == "float32":
        return
    if tolerance < _MIN_TOLERANCE_OF_BFLOAT16:
        raise UserError(
            f"weights.probe_tolerance is {tolerance:g}, which requires float32, but engines.dtype "
            f"{engines.dtype} means {dtype} here. Remove weights.probe_tolerance, or set "
            "engines.dtype and model.dtype float32."
        )


def check_store(config: RunConfig, directory: RunDirectory) -> None:
    """Raise UserError if the trajectory store cannot be written on this host, which runs the
    manager."""
    from megatron_async.store.location import check_location, location_of_writer

    check_location(location_of_writer(directory.store_file, config.store.directory))


def _check_checkpoint(path: Path, architecture: Architecture) -> None:
    """Raise UserError unless `path` has a checkpoint manifest that fits the model.

    The checkpoint's other files are verified when they are read.
    """
    from megatron_async.checkpoint.placement import incompatibility

    if not is_checkpoint(path):
        raise UserError(
            f"model.checkpoint is {str(path)!r}, which has no {MANIFEST_NAME} and is "
            "not a checkpoint"
        )
    checkpoint = open_checkpoint(path, "model.checkpoint", lambda _: [])
    if fault := incompatibility(checkpoint.manifest, architecture, None):
        raise UserError(f"model.checkpoint is {path}, which does not fit model.path: {fault}")


def check_resume(directory: RunDirectory, config: RunConfig, from_step: int | None = None) -> None:
    """Raise UserError if the run in `directory` cannot be resumed with `config`.

    It cannot be resumed if its checkpoints have another format version or were saved by another
    optimizer, if the number of lineages so far is not stored, or if a checkpoint that may be the
    newest has a damaged manifest.

    Args:
        directory: The run directory.
        config: Settings of the resume.
        from_step: Step to which the user returns the run; newer checkpoints are moved aside, so
            damaged manifests do not matter. None to resume from the newest checkpoint.
    """
    directory.lineages_so_far()
    if from_step is None:
        check_manifests(directory.checkpoints)
    for checkpoint in list_checkpoints(directory.checkpoints)[:1]:
        name, saved = config.optimizer.name, checkpoint.manifest.optimizer
        if saved not in (None, name):
            raise UserError(
                f"optimizer.name is {name!r}, but {checkpoint.path} holds the state of {saved!r}. "
                f"Set it to {saved!r}, or start a new run from these weights with "
                f"model.checkpoint={checkpoint.path}."
            )


def check_same_run(
    directory: RunDirectory, before: RunConfig, config: RunConfig
) -> tuple[str, ...]:
    """Raise UserError if a resume would change the run's directory, model, weights or data.

    Args:
        directory: The run directory.
        before: Settings of the run so far.
        config: Settings of the resume.

    Returns:
        Notices of changed data files that `task.changed_data: accept` allows.
    """
    if RunDirectory.of(config) not in (RunDirectory.of(before), directory):
        key, value = ("name", config.name) if config.name != before.name else ("root", config.root)
        raise UserError(
            f"{key} is {value!r}, but a resume cannot move the run {directory.path}. Remove {key}, "
            "or rename the directory and resume that."
        )
    own = next(iter(list_checkpoints(directory.checkpoints)), None)
    if own and config.model.checkpoint not in ("", before.model.checkpoint):
        raise UserError(
            f"model.checkpoint is {config.model.checkpoint!r}, but {directory.path} resumes from "
            f"its own checkpoint {own.path.name}. Remove model.checkpoint, or start a new run "
            "under "
            "another name."
        )
    for difference in _differences(directory, before, config):
        raise UserError(
            f"model.path is {config.model.path!r}, but {directory.path} is a run of another model: "
            f"{difference}. Resume it with its own model (model.path was {before.model.path!r}), "
            "or start a new run under another name."
        )
    known = directory.data_identity()
    changes = data_changes(known, data_identity(config, known))
    if changes and config.task.changed_data == "refuse":
        raise UserError(
            f"the data files of {directory.path} have changed since its start: "
            f"{'; '.join(changes)}. "
            "The run's position in the data, its held-out problems and its accuracies belong to "
            "the former files. Restore them, accept the new ones by task.changed_data=accept, or "
            "start a new run."
        )
    return tuple(f"the data have changed (task.changed_data accept): {text}" for text in changes)


def _differences(directory: RunDirectory, before: RunConfig, config: RunConfig) -> Iterator[str]:
    """Yield each way in which the model or tokenizer of `config` differs from the run's own.

    The new model is compared with the newest checkpoint and, if its directory still exists, the
    model of `before`. The new tokenizer is compared with the digest of the tokenizer that the run
    stored at its start.
    """
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
                yield f"the run's {name} is {was}, the new model's is {now[name]}"
    tokenizer = directory.tokenizer_digest() or tokenizer_digest(old.path)
    if tokenizer and tokenizer != tokenizer_digest(new.path):
        yield "the tokenizer or the chat template differs"


def check_policy(config: RunConfig, *, tokenizer: bool = True) -> Architecture:
    """Raise UserError unless the model and its weights are valid and the parallel layout suits the
    model.

    Returns:
        The model's architecture.
    """
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
    """Check model, weights, parallel layout, engines and task, without starting the run's
    processes.

    Args:
        config: The run's settings.
        generates: Whether engines will generate responses; otherwise the run trains on worked
            answers (fine-tuning).

    Raises:
        UserError: The run cannot start.
    """
    from megatron_async.models.layout import check_engine_layout
    from megatron_async.telemetry.trackers.build import build_trackers

    check_engines(config.engines)
    # The module is imported only for a user's own loss, because it imports torch.
    if is_import_path(config.algorithm.loss.name):
        from megatron_async.algorithms.own_loss import check_own_loss

        check_own_loss(config.algorithm)
    build_trackers(config.telemetry)
    architecture = check_policy(config)
    if generates and "--enable-dp-attention" not in config.engines.extra_args:
        check_engine_layout(architecture, config.engines.tensor)
    if config.engines.quantization == "fp8":
        if config.model.family:
            raise UserError(
                f"model.family is {config.model.family!r}; engines.quantization fp8 supports only "
                "built-in families. Set engines.quantization none."
            )
        from megatron_async.engines.sglang.process import resolve_device
        from megatron_async.weight_sync.quantize import check_fp8

        check_fp8(architecture, config.engines, resolve_device(config.engines))
    return _check_task(config) if generates else _check_worked_answers(config)


def check_run_leniently(config: RunConfig) -> PreflightResult:
    """Check the run as `check_run` does, but return a refusal as a notice instead of raising it."""
    try:
        return check_run(config)
    except (UserError, ComponentFailure) as error:
        return PreflightResult(config, (f"train refuses this run: {error}",))


def check_evaluation(config: RunConfig, model_path: Path) -> PreflightResult:
    """Check before an evaluation that an engine can load the model in `model_path`, and that the
    task works with its tokenizer. This starts no engine."""
    check_served(model_path)
    return _check_task(config.with_section("model", path=str(model_path)), trains=False)


def _check_task(config: RunConfig, *, trains: bool = True) -> PreflightResult:
    """Build the task and check the lengths and the number of its problems. Also try the rewards,
    and an episode if the run has episodes.

    `trains` is whether training batches will be drawn from the task.
    """
    from megatron_async.rollout.prompt_lengths import max_sequence_tokens
    from megatron_async.scoring.rewards.check import TRIED_ROWS, check_rewards
    from megatron_async.tasks import build_task

    task = build_task(config.task, config.model.path, config.eval, has_episodes=config.has_episodes)
    payloads = [prompt.payload for prompt in task.train_prompts(0, TRIED_ROWS)]
    untried = check_rewards(config.scorers, *payloads) if config.scores else ()
    longest, excluded = max_sequence_tokens(config), 0
    if longest is not None:
        _check_prompt_budget(config, longest)
        excluded = task.check_lengths(longest, config.sampling.max_new_tokens)
    trial = _trial_episode(config, payloads[0], longest)
    training, heldout = task.counts(config.eval.prompts)
    groups = config.schedule.groups_per_batch
    if trains and training is not None and groups > training:
        raise UserError(
            f"schedule.groups_per_batch is {groups}, but task.path {config.task.path} has only "
            f"{training} training problems (others are held out, task.heldout_share "
            f"{config.task.heldout_share:g}), so a batch would contain a problem twice. Lower "
            "schedule.groups_per_batch or add problems."
        )
    checked = PreflightResult(config)
    if config.task.heldout_share:
        checked = _with_heldout(config, heldout)
    for eval_set in checked.config.eval_sets():
        limit = None if longest is None else longest - eval_set.sampling.max_new_tokens
        task.check_evaluation(eval_set.prompts, eval_set.name, limit)
    more = ""
    if excluded:
        more = f"\nexcluded because too long (task.long_prompts: filter): {excluded:,}"
    return replace(
        checked,
        summary=task.summary() + more + trial.summary,
        notices=(*checked.notices, *_other_recipe(config), *untried, *trial.notices),
    )


def _other_recipe(config: RunConfig) -> Iterator[str]:
    """Yield a notice if the user has chosen a schedule preset but no recipe, and the default recipe
    is meant for another preset."""
    recipe, preset = config.algorithm.recipe, config.schedule.preset
    chosen = "preset" in config.explicit.get("schedule", {})
    named = "recipe" in config.explicit.get("algorithm", {})
    presets = {name: its.get("schedule", {}).get("preset") for name, its in RECIPES.items()}
    if chosen and not named and presets[recipe] != preset:
        others = [name for name, its in presets.items() if its == preset]
        yield (
            f"schedule.preset is {preset}, but algorithm.recipe has its default {recipe}, so "
            f"advantage, loss and correction are those of {recipe}. Recipes for this schedule: "
            f"{', '.join(others)}"
        )


def _trial_episode(
    config: RunConfig, payload: Mapping[str, Any], longest: int | None
) -> PreflightResult:
    """Play a trial episode if the run uses an environment or agent; return its notices and summary.

    Args:
        config: The run's settings.
        payload: Problem of the episode.
        longest: Largest number of tokens of prompt and response together that an engine accepts;
            None if nothing limits it.
    """
    if not config.has_episodes:
        return PreflightResult(config)
    from megatron_async.environments.check import check_environment

    found = check_environment(config, payload, longest)
    return PreflightResult(config, found.notices, f"\n{found.summary}")


def _check_prompt_budget(config: RunConfig, longest: int) -> None:
    """Raise UserError if `sampling.max_new_tokens` leaves no tokens for a prompt; `longest` is the
    largest number of tokens of prompt and response together that an engine accepts."""
    new = config.sampling.max_new_tokens
    if new >= longest:
        raise UserError(
            f"sampling.max_new_tokens is {new}, but an engine accepts at most {longest} tokens of "
            "prompt and response together (engines.context_length or the model's context, and "
            "engines.max_total_tokens), so no prompt fits. Lower sampling.max_new_tokens or raise "
            "the others."
        )


def _with_heldout(config: RunConfig, heldout: int) -> PreflightResult:
    """Lower `eval.prompts` to `heldout`, the number of held-out problems, with a notice, if it has
    its default and that is larger.

    Raises:
        UserError: `eval.prompts` was set by the user and is too large, or no problem is held out.
    """
    requested, share = config.eval.prompts, config.task.heldout_share
    if heldout >= requested:
        return PreflightResult(config)
    has = f"the task has {heldout} held-out problems (task.heldout_share {share:g})"
    if heldout == 0 or "prompts" in config.eval.model_fields_set:
        raise UserError(
            f"eval.prompts is {requested}, but {has}, where equal prompts count once. Lower "
            "eval.prompts, raise task.heldout_share, add problems, or hold out none "
            "(task.heldout_share 0)."
        )
    return PreflightResult(
        config.with_section("eval", prompts=heldout),
        (f"eval.prompts is {heldout} instead of its default {requested}: {has}",),
    )


def _check_worked_answers(config: RunConfig) -> PreflightResult:
    """Check that there are enough examples (prompts with responses to learn) for one batch of
    fine-tuning."""
    from megatron_async.tasks import build_task

    task = build_task(config.task, config.model.path, config.eval)
    size, count = config.sft.batch_sequences, config.sft.examples
    # Generated examples are all valid, so as many as one batch suffice here. Every row of a file is
    # checked.
    if not config.sft.data:
        count = min(size, count)
    found = len(task.worked_examples(count, config.sft.file()))
    if found < size:
        source = f"sft.data {config.sft.data} has" if config.sft.data else "sft.examples is"
        raise UserError(
            f"sft.batch_sequences is {size}, but {source} only {found}, so a batch would be larger "
            "than the data. Lower sft.batch_sequences."
        )
    if config.sft.data:
        config = config.with_section("sft", examples=found)
    return PreflightResult(config, summary=f"{found:,} examples of {config.sft.data or 'the task'}")

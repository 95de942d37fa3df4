"""Creates tasks and problem sources from settings.

Imports are inside the functions, because a scorer process needs neither a tokenizer nor torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from megatron_async.config.files import vocabulary_of
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError

if TYPE_CHECKING:
    from megatron_async.config.evaluation import EvalConfig
    from megatron_async.tasks.base import ProblemSource, Task
    from megatron_async.tasks.prompts import PromptRenderer


def build_task(
    config: TaskConfig,
    model_path: str,
    evaluation: EvalConfig | None = None,
    *,
    has_episodes: bool = False,
) -> Task:
    """Create the task that `config` describes, tokenized for the model in the folder `model_path`.

    Args:
        config: The settings under `task`.
        model_path: A Hugging Face model folder.
        evaluation: The settings under `eval`. Problems of its evaluation sets are never trained on.
            None for no evaluation sets.
        has_episodes: Whether an environment opens each episode; prompts then have no tokens.

    Raises:
        UserError: If a setting or a data file is not usable.
    """
    from megatron_async.tasks.files import ProblemFile
    from megatron_async.tasks.prompts import PromptRenderer
    from megatron_async.tasks.text_task import TextTask, load_tokenizer, stop_tokens

    tokenizer = load_tokenizer(model_path)
    prompts = PromptRenderer(
        config, tokenizer, vocabulary_of(model_path), has_episodes=has_episodes
    )
    files = {} if evaluation is None else evaluation.files()

    try:
        evaluated = {
            name: ProblemFile(
                config.completed(file), setting, config.prompt_template, config.bad_rows, prompts
            )
            for name, (setting, file) in files.items()
        }
    except UserError:
        # The evaluation sets use some settings of the task. If such a setting is wrong, building
        # the training source fails too. Prefer that error, because it names the task's own file,
        # where the user looks for the mistake. Otherwise raise the error of the evaluation set.
        build_source(config, prompts=prompts)
        raise
    elsewhere = {key for file in evaluated.values() for key in file.keys}
    source = build_source(config, elsewhere, prompts)
    stops = stop_tokens(model_path, tokenizer)
    task = TextTask(config, source, tokenizer, prompts, stops, evaluated, has_episodes=has_episodes)
    # Make one prompt now, so that a template that does not fit the problems is reported before the
    # run starts.
    task.train_prompts(0, 1)
    return task


def build_source(
    config: TaskConfig, elsewhere: Collection[int] = (), prompts: PromptRenderer | None = None
) -> ProblemSource:
    """Create the source of the task's problems as text.

    Args:
        config: The settings under `task`.
        elsewhere: Keys (`Problem.key`) of problems in evaluation sets, which must not be trained
            on.
        prompts: If given, rows of files that it cannot render as prompts count as bad rows, which
            `task.bad_rows` refuses or skips.

    Raises:
        UserError: If a setting or a data file is not usable.
    """
    if config.kind == "files":
        from megatron_async.tasks.files import FileProblems

        return FileProblems(config, elsewhere, prompts)
    if config.kind == "seeds":
        from megatron_async.tasks.seeds import SeedProblems

        return SeedProblems(config)
    from megatron_async.tasks.procedural import ProceduralProblems

    return ProceduralProblems(config)

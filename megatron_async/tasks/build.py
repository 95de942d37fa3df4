"""From settings to a task, to its problems and to its scorer.

Imports are local: a scorer process needs neither a tokenizer nor torch.
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
    """The task, tokenized for the model in `model_path`. Raises UserError.

    `plays`: an environment opens each episode; prompts then have no tokens.
    """
    from megatron_async.tasks.files import ProblemFile
    from megatron_async.tasks.prompts import PromptRenderer
    from megatron_async.tasks.text_task import TextTask, load_tokenizer, stop_tokens

    tokenizer = load_tokenizer(model_path)
    prompts = PromptRenderer(
        config, tokenizer, vocabulary_of(model_path), has_episodes=has_episodes
    )
    files = {} if evaluation is None else evaluation.files()
    how = (config.prompt_template, config.bad_rows, prompts)
    try:
        evaluated = {
            name: ProblemFile(config.completed(file), setting, *how)
            for name, (setting, file) in files.items()
        }
    except UserError:
        # A setting of the task that its evaluation sets share is named by the task's own file.
        build_source(config, prompts=prompts)
        raise
    elsewhere = {key for file in evaluated.values() for key in file.keys}
    source = build_source(config, elsewhere, prompts)
    stops = stop_tokens(model_path, tokenizer)
    task = TextTask(config, source, tokenizer, prompts, stops, evaluated, has_episodes=has_episodes)
    task.train_prompts(0, 1)  # a template that does not fit is reported now, not mid-run
    return task


def build_source(
    config: TaskConfig, elsewhere: Collection[int] = (), prompts: PromptRenderer | None = None
) -> ProblemSource:
    """The task's problems as text; `elsewhere`: keys of those that others evaluate on.

    With `prompts`, rows of files of which no prompt can be made are bad rows. Raises UserError.
    """
    if config.kind == "files":
        from megatron_async.tasks.files import FileProblems

        return FileProblems(config, elsewhere, prompts)
    if config.kind == "seeds":
        from megatron_async.tasks.seeds import SeedProblems

        return SeedProblems(config)
    from megatron_async.tasks.procedural import ProceduralProblems

    return ProceduralProblems(config)

"""From settings to a task and to its scorer.

Imports are local: a verifier process needs a scorer, but neither a tokenizer nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async.config.rollout import TaskConfig

if TYPE_CHECKING:
    from megatron_async.tasks.base import ProblemSource, Scorer, Task


def build_task(config: TaskConfig, model_path: str) -> Task:
    """The task, tokenized for the model in `model_path`. Raises UserError."""
    from megatron_async.tasks.text_task import TextTask, load_tokenizer, stop_tokens

    source = build_source(config)
    tokenizer = load_tokenizer(model_path)
    task = TextTask(config, source, tokenizer, stop_tokens(model_path, tokenizer))
    task.train_prompts(0, 1)  # a template that does not fit is reported now, not mid-run
    return task


def build_source(config: TaskConfig) -> ProblemSource:
    """The task's problems as text. Raises UserError."""
    if config.kind == "jsonl":
        from megatron_async.tasks.jsonl import JsonlProblems

        return JsonlProblems(config)
    from megatron_async.tasks.reasoning_gym import ReasoningGymProblems

    return ReasoningGymProblems(config)


def build_scorer(config: TaskConfig) -> Scorer:
    """The task's judge. Raises UserError."""
    if config.kind == "jsonl":
        from megatron_async.tasks.jsonl import JsonlScorer

        return JsonlScorer(config)
    from megatron_async.tasks.reasoning_gym import ReasoningGymScorer

    return ReasoningGymScorer(config)

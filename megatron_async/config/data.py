"""Settings of data: where prompts come from and how they become tokens."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from megatron_async.config.base import Settings


class DataConfig(Settings):
    """Where prompts come from; the part of `task` that ends where a response begins."""

    kind: Literal["reasoning_gym", "jsonl"] = Field(
        "reasoning_gym", description="Procedural tasks, or prompts and answers from a JSONL file."
    )
    name: str = Field("chain_sum", description="reasoning-gym task; for jsonl the answer checker.")
    path: str = Field(
        "",
        description="jsonl: file with `prompt` and `answer` in each line, and where wanted "
        "`priority`, a whole number (default 0; higher first, see docs/schedules.md).",
    )
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the task; `mixture`: a list of such arguments, each with a "
        "`weight`, from which every problem draws one.",
    )
    prompt_template: str = Field(
        "{question}", description="Prompt; a procedural task's metadata may be named too."
    )
    long_prompts: Literal["refuse", "drop"] = Field(
        "refuse",
        description="A prompt of a file that no engine can take: the run does not start, or the "
        "prompt is dropped when its turn comes, as `refused` (in an evaluation: counted as wrong).",
    )
    remove_spaces: bool = Field(False, description="Prompts without blanks, for character models.")
    chat_template: Literal["auto", "never"] = Field(
        "auto", description="`auto`: the tokenizer's chat template, when it has one."
    )
    heldout_share: float = Field(
        0.1, gt=0, lt=1, description="Share of problems (by hash of their text) kept for eval."
    )
    direct_share: float = Field(
        0.0, ge=0, le=1, description="Worked answers that state only the result, as a share."
    )
    terse_share: float = Field(
        0.0, ge=0, le=1, description="Worked answers that note only running results, as a share."
    )
    train_seed: int = Field(1, description="Seed of the training problems.")
    eval_seed: int = Field(1_000_003, description="Seed of the held-out problems.")

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.direct_share + self.terse_share > 1:
            raise ValueError(
                f"task.direct_share {self.direct_share} and task.terse_share {self.terse_share} "
                "add up to more than 1"
            )
        return self

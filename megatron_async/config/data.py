"""Settings of data: where prompts come from and how they become tokens."""

from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from megatron_async.config.base import Settings

LAYOUTS = Literal[
    "rows", "gsm8k", "math", "aime", "deepscaler", "dapo_math", "mbpp_plus", "minif2f"
]


class ColumnsConfig(Settings):
    """Columns of a file by their names; a dot leads into a mapping (`reward_model.ground_truth`).

    What is not set here is the layout's.
    """

    prompt: str | None = None
    """A text, or a list of chat messages."""
    answer: str | None = None
    """The reference answer; "": rows have none, and the reward needs none."""
    response: str | None = None
    """sft: the text to learn."""
    priority: str | None = None
    """Whole numbers, higher first (docs/schedules.md); 0 where it is missing."""


class FileConfig(Settings):
    """Rows on disk and what their columns are."""

    path: str = ""
    """A JSONL or Parquet file, a directory of them, or a directory that Hugging Face `datasets`
    saved."""
    split: str = ""
    """Of a directory: the split to read; needed where it has several."""
    layout: LAYOUTS = "rows"
    """Columns of a published data set; `rows`: `prompt`, `answer`, `response` and `priority`
    (docs/data.md)."""
    columns: ColumnsConfig = ColumnsConfig()
    """Columns that are called otherwise."""
    filter: dict[str, str | int | bool] = Field(default_factory=dict)
    """Only rows whose columns have these values."""


File = TypeVar("File", bound=FileConfig)


class SourceConfig(FileConfig):
    """A training file among several."""

    weight: float = Field(1.0, gt=0)
    """Its share of the prompts is weight / their sum."""


class PoolConfig(Settings):
    """Prompts that are answered right about as often."""

    up_to: float = Field(..., ge=0, le=1)
    """Highest pass rate; the next pool is above."""
    share: float = Field(..., ge=0, le=1)
    """Share of their turns in which these prompts are asked."""


class DifficultyConfig(Settings):
    """Prompts asked less often, or no more, by how often they were answered right."""

    pools: list[PoolConfig] = Field(default_factory=list)
    """By ascending pass rate; empty: every prompt in each of its turns. `share: 0` up to 0 drops
    what was never solved, at 1 what always is."""
    min_attempts: int = Field(16, ge=1)
    """Scored responses before a prompt belongs to a pool."""

    def check(self) -> None:
        ends = [pool.up_to for pool in self.pools]
        if ends and (ends != sorted(set(ends)) or ends[-1] != 1):
            raise ValueError(f"task.difficulty.pools must ascend and end up_to 1, got {ends}")
        if ends and not any(pool.share for pool in self.pools):
            raise ValueError("task.difficulty.pools drop every prompt: give one a share above 0")


class DataConfig(FileConfig):
    """Sources of prompts: the part of `task` that ends where a response begins."""

    kind: Literal["chain_sum", "reasoning_gym", "files", "seeds"] = "chain_sum"
    """Source of problems: `chain_sum`: sums of integers. `reasoning_gym`: the task `name` of that
    optional package. `files`: rows of files (the default where `path` or `sources` is set).
    `seeds`: rows {seed} for an environment."""
    name: str = ""
    """Name of the task of reasoning-gym; for files without `reward`, the checker: exact or math."""
    sources: list[SourceConfig] = Field(default_factory=list)
    """Several files with weights, in place of `path`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task; `mixture`: a list of such arguments, each with a `weight`, from which
    every problem draws one."""
    prompt_template: str = ""
    """Prompt; it may name `question` and every column or metadata that is a text or a number; of
    chain_sum also `compact`, the expression without blanks. Empty: the layout's, else
    {question}."""
    system_prompt: str = ""
    """System message of a chat prompt that brings none of its own."""
    long_prompts: Literal["refuse", "filter", "drop"] = "refuse"
    """Treatment of prompts in files that are too long for the engines. `refuse`: the run does
    not start. `filter`: training prompts are removed before the run starts, and their number is
    shown. `drop`: the prompt is dropped as `refused` when its turn comes. In an evaluation, `drop`
    counts it as wrong, with a warning; the other values refuse the start."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Rows that cannot be used, of files to train on, to evaluate on and of `sft.data`: refuse the
    start and list the first ten, or leave them out and show their number."""
    changed_data: Literal["refuse", "accept"] = "refuse"
    """Whether to accept or refuse a resume when a data file has changed since the run's start;
    `data.json` of the run directory holds the size and a hash of each."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto`: the tokenizer's chat template, when it has one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, as `enable_thinking`."""
    skip_special_tokens: bool = False
    """Whether rewards and evaluation samples get responses without any special token. Otherwise
    only end and padding tokens at the end of a response are left out, and marks such as `<think>`
    stay."""
    heldout_share: float = Field(0.1, ge=0, lt=1)
    """Share of problems (by hash of their text) kept for eval; 0 where eval.sets brings files for
    it. Problems of those files are never trained on."""
    difficulty: DifficultyConfig = DifficultyConfig()
    """Sampling by pass rate."""
    train_seed: int = 1
    """Seed of the training problems."""

    @model_validator(mode="before")
    @classmethod
    def _kind(cls, values: Any) -> Any:
        """Default `kind` to `files` if `path` or `sources` is set."""
        if isinstance(values, dict) and (values.get("path") or values.get("sources")):
            return {"kind": "files", **values}
        return values

    def check(self) -> None:
        if self.path and self.sources:
            raise ValueError("task.path and task.sources are both set: put the path among them")
        if self.kind != "files" and (self.path or self.sources):
            raise ValueError(f"task.kind {self.kind} reads no files: leave task.path/sources out")
        if self.kind == "chain_sum" and self.name:
            raise ValueError(
                f"task.name is {self.name!r}; task.kind chain_sum takes no name. Leave task.name "
                "out, or set task.kind to reasoning_gym."
            )
        if self.kind != "files" and self.heldout_share == 0:
            raise ValueError("task.heldout_share 0 needs task.kind files")

    def files(self) -> list[SourceConfig]:
        """The files to train on; a source without columns of its own has the task's."""
        if not self.sources:
            own = {name: getattr(self, name) for name in FileConfig.model_fields}
            return [SourceConfig.model_validate(own)]
        return [self.completed(source) for source in self.sources]

    def completed(self, file: File) -> File:
        """`file` with the task's layout and columns, unless it sets one of them itself."""
        if file.layout != "rows" or file.columns != ColumnsConfig():
            return file
        return file.model_copy(update={"layout": self.layout, "columns": self.columns})

"""Settings of data: where prompts come from, and how they become tokens."""

from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from megatron_async.config.base import Settings

LAYOUTS = Literal[
    "rows", "gsm8k", "math", "aime", "deepscaler", "dapo_math", "mbpp_plus", "minif2f"
]


class ColumnsConfig(Settings):
    """Names of the columns of a file; a dot leads into a mapping (`reward_model.ground_truth`).

    A name that is not set is the one in the file's `layout`.
    """

    prompt: str | None = None
    """Column of the prompt: a text, or a list of chat messages."""
    answer: str | None = None
    """Column of the reference answer; "" = rows have none, and the reward needs none."""
    response: str | None = None
    """For `sft`, column of the text to learn."""
    priority: str | None = None
    """Column of the priority, an integer; higher ones run first (docs/schedules.md). A missing
    value is 0."""


class FileConfig(Settings):
    """A data file: its path, its rows and its columns."""

    path: str = ""
    """A JSONL or Parquet file, a directory of such files, or a directory that Hugging Face
    `datasets` saved."""
    split: str = ""
    """Split to read from a directory; required if it has several."""
    layout: LAYOUTS = "rows"
    """Published data set in whose format the file is: its column names, how its answers are found,
    and its prompt template (docs/data.md). `rows`: the columns are named `prompt`, `answer`,
    `response` and `priority`."""
    columns: ColumnsConfig = ColumnsConfig()
    """Columns that have other names than in the layout."""
    filter: dict[str, str | int | bool] = Field(default_factory=dict)
    """Required values of columns, for example {level: 5}; rows with another value are not used."""


File = TypeVar("File", bound=FileConfig)


class SourceConfig(FileConfig):
    """One of several training files, and its share of the prompts."""

    weight: float = Field(1.0, gt=0)
    """Weight of the file; its share of the prompts is this weight divided by the sum of all
    weights."""


class PoolConfig(Settings):
    """A pool: the prompts whose pass rate (share of right responses) lies in one interval."""

    up_to: float = Field(..., ge=0, le=1)
    """Highest pass rate of the pool. The lowest is just above the `up_to` of the previous pool."""
    share: float = Field(..., ge=0, le=1)
    """Probability with which a prompt of the pool is used when its turn comes."""


class DifficultyConfig(Settings):
    """Sampling of prompts by their pass rate: prompts of some pools are used less often or not at
    all."""

    pools: list[PoolConfig] = Field(default_factory=list)
    """Pools by ascending pass rate; empty = every prompt is used each time. A first pool with
    `up_to: 0` and `share: 0` drops prompts that were never solved. A last pool with `share: 0`
    drops prompts with the highest pass rates."""
    min_attempts: int = Field(16, ge=1)
    """Number of scored responses that a prompt needs before it is put into a pool; until then it is
    used each time."""

    def check(self) -> None:
        ends = [pool.up_to for pool in self.pools]
        if ends and (ends != sorted(set(ends)) or ends[-1] != 1):
            raise ValueError(f"task.difficulty.pools must ascend and end up_to 1, got {ends}")
        if ends and not any(pool.share for pool in self.pools):
            raise ValueError("task.difficulty.pools drop every prompt; give a pool a share above 0")


class DataConfig(FileConfig):
    """Sources of prompts: the settings of `task` that do not concern responses."""

    kind: Literal["chain_sum", "reasoning_gym", "files", "seeds"] = "chain_sum"
    """Source of problems. `chain_sum`: sums of integers. `reasoning_gym`: the task `name` of that
    optional package. `files`: rows of files (the default if `path` or `sources` is set). `seeds`:
    rows that contain only a `seed`, from which an environment makes its problem."""
    name: str = ""
    """With kind reasoning_gym, name of the task in that package. With kind files and without
    `reward`, the checker of responses: exact or math."""
    sources: list[SourceConfig] = Field(default_factory=list)
    """Several files with weights, instead of `path`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a generated task (chain_sum or reasoning_gym). To mix several kinds of problems,
    set `mixture` to a list of such arguments, each with a `weight`; every problem draws one of
    them."""
    prompt_template: str = ""
    """Template of the prompt. It may contain {question} and, in braces, the name of every other
    column or metadata item whose value is a text, a number or a list of texts, except the answer.
    With chain_sum it may also contain {compact}, the expression without spaces. Empty = the
    layout's template, otherwise {question}."""
    system_prompt: str = ""
    """System message for chat prompts that have no system message."""
    long_prompts: Literal["refuse", "filter", "drop"] = "refuse"
    """Treatment of prompts in files that are too long for the engines. `refuse`: the run does not
    start. `filter`: training prompts are removed before the run starts, and their number is shown.
    `drop`: the prompt is dropped as `refused` when its turn comes. In an evaluation, `drop` counts
    it as wrong, with a warning; the other values refuse the start."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Treatment of invalid rows in files for training, evaluation and `sft.data`. `refuse`: the run
    does not start, and the first ten are listed. `skip`: they are not used, and their number is
    shown."""
    changed_data: Literal["refuse", "accept"] = "refuse"
    """Treatment of a resume if a data file has changed since the run's start: `refuse` stops it,
    `accept` continues with the changed file. `data.json` in the run directory contains the size and
    a hash of each file."""
    chat_template: Literal["auto", "never"] = "auto"
    """Use of the tokenizer's chat template. `auto`: if it has one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, for example `enable_thinking`."""
    skip_special_tokens: bool = False
    """Whether rewards and evaluation samples get responses without any special token. Otherwise
    only end and padding tokens at the end of a response are removed, and marks such as `<think>`
    stay."""
    heldout_share: float = Field(0.1, ge=0, lt=1)
    """Share of the problems that is held out for evaluation, chosen by a hash of their text. 0 =
    none, for example if eval.sets has its own files. Problems of those files are never trained
    on."""
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
            raise ValueError(
                "task.path and task.sources are both set; put the path into task.sources"
            )
        if self.kind != "files" and (self.path or self.sources):
            raise ValueError(
                f"task.kind is {self.kind}, which reads no files; remove task.path and sources"
            )
        if self.kind == "chain_sum" and self.name:
            raise ValueError(
                f"task.name is {self.name!r}; task.kind chain_sum takes no name. Remove task.name, "
                "or set task.kind to reasoning_gym."
            )
        if self.kind != "files" and self.heldout_share == 0:
            raise ValueError(
                f"task.heldout_share is 0, which requires task.kind files, got {self.kind}"
            )

    def files(self) -> list[SourceConfig]:
        """Return the files to train on: those of `sources` or, without any, the file of `path`.

        A source with layout `rows` and no columns gets the task's layout and columns.
        """
        if not self.sources:
            own = {name: getattr(self, name) for name in FileConfig.model_fields}
            return [SourceConfig.model_validate(own)]
        return [self.completed(source) for source in self.sources]

    def completed(self, file: File) -> File:
        """Return `file` with the task's layout and columns; return it unchanged if its layout is
        not `rows` or if it sets columns."""
        if file.layout != "rows" or file.columns != ColumnsConfig():
            return file
        return file.model_copy(update={"layout": self.layout, "columns": self.columns})

"""Settings of rewards: what scores a response, and the limits under which it is scored."""

from pathlib import Path
from typing import Any, Final

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.config.rollout import TaskConfig
from megatron_async.runtime.import_path import is_import_path

BUILT_IN: Final = ("task", "exact", "regex", "math", "code", "command", "http", "judge")
ASYNCHRONOUS: Final = ("http", "judge")
"""Those of them that wait for a network, hundreds at once in one process."""

BATCH_METRICS: Final = frozenset(
    {"mean", "std", "standard_error", "min", "max", "uninformative_groups"}
)
"""Names under `reward/` that are those of the sum; no part of a reward may have one."""


class RewardConfig(Settings):
    """A reward. `reward:` takes one (its name alone is enough) or a list of them."""

    name: str = Field(
        description="A function or class of yours (package.module:name or file.py:name), or one "
        f"of {', '.join(BUILT_IN)}. `task`: the task's own scorer."
    )
    label: str = ""
    """Its name in metrics; empty: the last part of `name`."""
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Factor of its score in the sum of all rewards."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keywords for it (docs/rewards.md)."""
    group: bool = False
    """It takes all responses to a prompt at once, as a list."""
    timeout_seconds: float | None = Field(None, gt=0)
    """Limit of one score; none = task.scorer_timeout_seconds."""
    concurrency: int = Field(512, ge=1)
    """An asynchronous one: most scores that wait for it at once."""

    @property
    def own(self) -> bool:
        """True for the user's code."""
        return is_import_path(self.name)

    @property
    def display_name(self) -> str:
        """Name in metrics and in the store."""
        return self.label or self.name.rpartition(":")[2]

    def check(self) -> None:
        if not self.own and self.name not in BUILT_IN:
            raise ValueError(
                f"reward is {self.name!r}; it must be package.module:name, path/to/file.py:name "
                f"or one of {', '.join(BUILT_IN)}"
            )


class SandboxConfig(Settings):
    """Limits of a program that a response brings along (rewards `code` and `command`)."""

    required: bool = False
    """Refuse to start where namespaces are not to be had (no network, own file system, own
    processes); false: go on with the remaining limits and log which are missing."""
    memory_mib: int = Field(1024, ge=16)
    """Memory of one process and of all together."""
    disk_mib: int = Field(64, ge=1)
    """Its directory and /tmp, in memory."""
    processes: int = Field(32, ge=2)
    """Processes and threads at once."""
    readable: list[str] = Field(default_factory=list)
    """Directories it may read besides the system's and Python's: a toolchain."""


class ScoringConfig(Settings):
    """Limits of scorer processes and of what they run."""

    memory_mib: int = Field(4096, ge=64)
    """Address space of one scorer process."""
    sandbox: SandboxConfig = SandboxConfig()
    """For programs in responses."""


class ScorerSettings(Settings):
    """All that a scorer process needs to know."""

    task: TaskConfig = TaskConfig()
    """Prompts."""
    rewards: list[RewardConfig] = Field(default_factory=list)
    """Empty: the task's own."""
    scoring: ScoringConfig = ScoringConfig()
    """Limits."""
    logs: str = ""
    """Directory of their logs; empty: standard error."""

    @property
    def parts(self) -> list[RewardConfig]:
        """The rewards to add up, at least one."""
        return self.rewards or [RewardConfig.model_validate({"name": "task"})]

    def logging_to(self, directory: Path) -> "ScorerSettings":
        """Return the same, with logs in `directory`, which exists."""
        return self.model_copy(update={"logs": str(directory)})

    @property
    def of_groups(self) -> bool:
        """True when a reward takes all responses to a prompt at once."""
        return any(part.group for part in self.parts)

    def limit_seconds(self, part: RewardConfig) -> float:
        """Limit of one score of `part`."""
        return part.timeout_seconds or self.task.scorer_timeout_seconds


def listed(value: Any) -> Any:
    """List the mappings that a single one, a name or a list of either stands for."""
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list):
        return [{"name": item} if isinstance(item, str) else item for item in value]
    return value


def named(value: Any) -> Any:
    """The mapping that a name alone stands for."""
    return {"name": value} if isinstance(value, str) else value


def check_labels(rewards: list[RewardConfig]) -> None:
    """Refuse two rewards whose parts would have the same names. Raises ValueError."""
    labels = [reward.display_name for reward in rewards]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"reward has {label!r} twice; give each a `label` of its own")
        if len(labels) > 1 and label in BATCH_METRICS:
            raise ValueError(
                f"reward has the name {label!r}, and reward/{label} is a metric of the sum of all "
                "rewards; give it another `label`"
            )

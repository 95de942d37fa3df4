"""Settings of rewards: how a response is scored, and the limits of scoring."""

from pathlib import Path
from typing import Any, Final

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.config.rollout import TaskConfig
from megatron_async.runtime.import_path import is_import_path

BUILT_IN: Final = ("task", "exact", "regex", "math", "code", "command", "http", "judge")
ASYNCHRONOUS: Final = ("http", "judge")
"""Built-in rewards that wait for the reply of a network service; one process runs hundreds of their
scores at once."""

BATCH_METRICS: Final = frozenset(
    {"mean", "std", "standard_error", "min", "max", "uninformative_groups"}
)
"""Names of the metrics `reward/NAME` that describe the sum of all rewards. A component of a
reward must not have such a name, because its mean is a metric `reward/NAME` too. If there are
several rewards, this holds for each reward as well. A single reward has no such metric."""


class RewardConfig(Settings):
    """One reward. Setting `reward` is one reward or a list of rewards; `NAME` is short for `{name:
    NAME}`."""

    name: str = Field(
        description="Your own function or class (package.module:name or file.py:name), or one "
        f"of {', '.join(BUILT_IN)}. `task`: the task's own scorer."
    )
    label: str = ""
    """Name of the reward in metrics; empty = the last part of `name`."""
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Factor of the score in the sum of all rewards."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward (docs/rewards.md)."""
    group: bool = False
    """Whether the reward gets all responses to a prompt at once, as a list."""
    timeout_seconds: float | None = Field(None, gt=0)
    """Time limit of one score, in seconds; none = task.scorer_timeout_seconds."""
    concurrency: int = Field(512, ge=1)
    """Largest number of scores of an asynchronous reward that run at once."""

    @property
    def own(self) -> bool:
        """Whether the reward is the user's own code."""
        return is_import_path(self.name)

    @property
    def display_name(self) -> str:
        """Name of the reward in metrics and in the store."""
        return self.label or self.name.rpartition(":")[2]

    def check(self) -> None:
        if not self.own and self.name not in BUILT_IN:
            raise ValueError(
                f"reward is {self.name!r}; it must be package.module:name, path/to/file.py:name "
                f"or one of {', '.join(BUILT_IN)}"
            )


class SandboxConfig(Settings):
    """Limits of a program that a reward runs because it is part of a response (rewards `code` and
    `command`)."""

    required: bool = False
    """Whether the run refuses to start if Linux namespaces are not available, which isolate the
    program from the network, the file system and other processes. With false, programs run with the
    limits that are available, and the missing ones are logged."""
    memory_mib: int = Field(1024, ge=16)
    """Memory of one process, and of all processes together, in MiB."""
    disk_mib: int = Field(64, ge=1)
    """Size of the program's directory and /tmp, in MiB. Both are in memory."""
    processes: int = Field(32, ge=2)
    """Largest number of processes and threads at once."""
    readable: list[str] = Field(default_factory=list)
    """Directories that the program may read in addition to the system's and Python's, for example a
    toolchain."""


class ScoringConfig(Settings):
    """Limits of scorer processes and of the programs that they run."""

    memory_mib: int = Field(4096, ge=64)
    """Address space of one scorer process, in MiB."""
    sandbox: SandboxConfig = SandboxConfig()
    """Sandbox for programs in responses."""


class ScorerSettings(Settings):
    """All settings that a scorer process needs."""

    task: TaskConfig = TaskConfig()
    """Prompts and their scoring."""
    rewards: list[RewardConfig] = Field(default_factory=list)
    """Rewards; empty = the task's own scorer."""
    scoring: ScoringConfig = ScoringConfig()
    """Limits of scorer processes."""
    logs: str = ""
    """Directory of the scorers' logs; empty = standard error."""

    @property
    def parts(self) -> list[RewardConfig]:
        """The rewards whose weighted scores are added up; without `rewards`, only the task's own
        scorer."""
        return self.rewards or [RewardConfig.model_validate({"name": "task"})]

    def logging_to(self, directory: Path) -> "ScorerSettings":
        """Return the same settings with logs in the existing directory `directory`."""
        return self.model_copy(update={"logs": str(directory)})

    @property
    def of_groups(self) -> bool:
        """Whether a reward gets all responses to a prompt at once."""
        return any(part.group for part in self.parts)

    def limit_seconds(self, part: RewardConfig) -> float:
        """Return the time limit of one score by the reward `part`, in seconds."""
        return part.timeout_seconds or self.task.scorer_timeout_seconds


def listed(value: Any) -> Any:
    """Convert the short forms of a list of mappings, such as `NAME` for `[{name: NAME}]`, to the
    list.

    A single name or mapping becomes a list of one; a name in the list becomes `{name: NAME}`. Any
    other value is returned unchanged, to be refused by pydantic.
    """
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list):
        return [{"name": item} if isinstance(item, str) else item for item in value]
    return value


def named(value: Any) -> Any:
    """Convert a text NAME to the mapping `{name: NAME}`; return anything else unchanged."""
    return {"name": value} if isinstance(value, str) else value


def check_labels(rewards: list[RewardConfig]) -> None:
    """Check that each reward's metric `reward/NAME` has a name that no other metric has.

    A single reward is always accepted, because it has no such metric: its mean is the metric of the
    sum.

    Raises:
        ValueError: If two rewards have the same name, or if there are several rewards and one of
            them has a name in `BATCH_METRICS`.
    """
    labels = [reward.display_name for reward in rewards]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"reward has the name {label!r} twice; give each reward its own `label`"
            )
        if len(labels) > 1 and label in BATCH_METRICS:
            raise ValueError(
                f"reward has the name {label!r}; reward/{label} is a metric of the sum of all "
                "rewards. Give it another `label`."
            )

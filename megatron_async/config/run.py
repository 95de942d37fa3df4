"""`RunConfig`: everything one run is, and the sub-commands' own settings."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr

from megatron_async.config.algorithm import AlgorithmConfig
from megatron_async.config.base import Settings
from megatron_async.config.data import LAYOUTS, ColumnsConfig, FileConfig
from megatron_async.config.environment import (
    AgentConfig,
    EnvironmentConfig,
    EpisodeConfig,
    refuse_changed,
)
from megatron_async.config.evaluation import EvalConfig, EvalSet
from megatron_async.config.model import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from megatron_async.config.reward import (
    RewardConfig,
    ScorerSettings,
    ScoringConfig,
    check_labels,
    listed,
    named,
)
from megatron_async.config.rollout import (
    EngineConfig,
    SamplingConfig,
    StoreConfig,
    TaskConfig,
    WeightsConfig,
)
from megatron_async.config.schedule import ScheduleConfig
from megatron_async.errors import short_repr

_SFT_STEPS: Final = 200
_LONGEST_NAME: Final = 200  # of 255 bytes, so that a suffix fits


class CheckpointConfig(Settings):
    """Schedule of checkpoints, and how many are kept."""

    every_steps: int = Field(10, ge=1)
    """Steps between two checkpoints."""
    keep: int = Field(2, ge=1)
    """Finalized checkpoints that stay on disk."""
    asynchronous: bool = True
    """Write while training goes on."""
    timeout_seconds: float = Field(1800.0, gt=0)
    """Limit of writing one checkpoint."""
    write_gb_per_s: float = Field(5.0, gt=0)
    """Rate at which the file system takes and gives the data of all nodes together, 1e9 bytes/s
    (assumed); the time that a stop needs before Slurm's limit follows from it."""
    export_hf: bool = True
    """Export a Hugging Face checkpoint at the end."""


class TeacherConfig(Settings):
    """Sampling of worked answers from a teacher (`sft --from-teacher`)."""

    samples: int = Field(5, ge=1)
    """Answers per prompt."""
    temperature: float = Field(0.7, gt=0)
    """Sampling temperature."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus."""
    prompts: int = Field(0, ge=0)
    """Training prompts to ask; 0 = all of the files."""
    min_reward: float = 1.0
    """Answers with this reward or more are kept."""
    epochs: int = Field(3, ge=1)
    """Times that each kept answer is learned."""
    model: str = ""
    """Name of the model at an address."""
    api_key_env: str = ""
    """Environment variable with a key for the address."""


class SFTConfig(Settings):
    """Supervised fine-tuning on worked answers of the task."""

    steps: int | None = Field(None, ge=1)
    """Number of batches, with one optimizer step each. Unset: derived from `epochs`, else 200."""
    epochs: int = Field(0, ge=0)
    """Number of times that each example is trained on; 0 = as often as `steps` allow."""
    batch_sequences: int = Field(64, ge=1)
    """Examples per step."""
    examples: int = Field(20000, ge=1)
    """Different worked answers."""
    data: str = ""
    """File or directory with `prompt` and `response`, or chat `messages` of which the assistant's
    are learned; empty = the task's own."""
    split: str = ""
    """Of a directory: the split to read."""
    layout: LAYOUTS = "rows"
    """Columns of a published data set (docs/data.md)."""
    columns: ColumnsConfig = ColumnsConfig()
    """Columns that are called otherwise."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Its own Adam."""
    teacher: TeacherConfig = TeacherConfig()
    """`--from-teacher` only."""

    def check(self) -> None:
        if self.steps is not None and self.epochs:
            raise ValueError(
                f"sft.steps is {self.steps} and sft.epochs is {self.epochs}: each follows from the "
                "other, so leave one of them out"
            )

    @property
    def batches(self) -> int:
        """Number of batches to train on; the learning-rate schedule spans them."""
        if self.epochs:
            return math.ceil(self.epochs * self.examples / self.batch_sequences)
        return self.steps or _SFT_STEPS

    def file(self) -> FileConfig | None:
        """The file of `data`; None: the task's own answers."""
        if not self.data:
            return None
        return FileConfig(
            path=self.data, split=self.split, layout=self.layout, columns=self.columns
        )


class TrackerConfig(Settings):
    """A place that the run reports to."""

    name: str
    """tensorboard, wandb, mlflow, or a Tracker of yours (package.module:Class or file.py:Class)."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keywords for it (docs/data.md#trackers)."""


class TelemetryConfig(Settings):
    """Records of a run, written while it goes on."""

    trackers: Annotated[list[TrackerConfig], BeforeValidator(listed)] = Field(
        default_factory=lambda: [TrackerConfig(name="tensorboard")]
    )
    """Trackers of the run; the name of one is enough for it. [] = none."""
    record_events: bool = True
    """Record scheduler events for `replay`."""
    progress: Literal["auto", "live", "lines", "off"] = "auto"
    """Terminal view."""


class ExperimentConfig(Settings):
    """Settings of measurements, to make two runs comparable (docs/semantics.md section 6)."""

    forced_lengths: list[int] = Field(default_factory=list)
    """Response length of trajectory i is entry i modulo their number; empty = off."""


class RunConfig(Settings):
    """A run: `megatron-async train --config FILE`."""

    name: str = Field("run", min_length=1, max_length=_LONGEST_NAME)
    """Directory name under `root`: 200 bytes, printable, without `/`."""
    root: str = "runs"
    """Where run directories are made."""
    seed: int = Field(1, ge=0)
    """Seed of initialization, prompts and shuffling."""
    steps: int = Field(100, ge=1)
    """Rollout batches to train on."""
    cluster: Literal["auto", "local", "ray"] = "auto"
    """What engines, scorers and the rollout manager run in: processes of this machine (`local`), or
    a Ray cluster. `auto`: local on one machine, but where RAY_ADDRESS names a cluster."""
    model: ModelConfig = ModelConfig()
    """Model."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout."""
    trainer: TrainerConfig = TrainerConfig()
    """Trainer."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    task: TaskConfig = TaskConfig()
    """Prompts and rewards."""
    reward: Annotated[list[RewardConfig], BeforeValidator(listed)] = Field(default_factory=list)
    """What scores a response; empty: the task's own scorer."""
    scoring: ScoringConfig = ScoringConfig()
    """Limits of scorers."""
    environment: Annotated[EnvironmentConfig, BeforeValidator(named)] = EnvironmentConfig()
    """What a policy plays against over many turns."""
    agent: Annotated[AgentConfig, BeforeValidator(named)] = AgentConfig()
    """A program that calls the policy by the OpenAI chat API, over many turns."""
    episode: EpisodeConfig = EpisodeConfig()
    """Episodes that the environment or the agent plays."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Scheduler."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Loss."""
    engines: EngineConfig = EngineConfig()
    """Inference."""
    weights: WeightsConfig = WeightsConfig()
    """Weight exchange."""
    store: StoreConfig = StoreConfig()
    """Trajectory store."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    sft: SFTConfig = SFTConfig()
    """`megatron-async sft`."""
    eval: EvalConfig = EvalConfig()
    """`megatron-async eval`."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Logging."""
    experiment: ExperimentConfig = ExperimentConfig()
    """For measurements only."""

    _explicit: dict[str, Any] | None = PrivateAttr(default=None)

    @property
    def explicit(self) -> Mapping[str, Any]:
        """Settings of file, command line or Python, which no other recipe or preset replaces."""
        return (
            self.model_dump(mode="json", exclude_unset=True)
            if self._explicit is None
            else self._explicit
        )

    def with_explicit(self, explicit: Mapping[str, Any]) -> Self:
        """The same settings; `explicit` are those that were set."""
        config = self.model_copy()
        config._explicit = dict(explicit)
        return config

    def with_section(self, section: str, **settings: Any) -> Self:
        """The same but for these settings of a section, which are not checked again."""
        changed = getattr(self, section).model_copy(update=settings)
        return self.model_copy(update={section: changed})

    @property
    def has_episodes(self) -> bool:
        """Return whether trajectories are episodes, of an environment or an agent."""
        return self.player.used

    @property
    def opens_episodes(self) -> bool:
        """Return whether `schedule.open_episodes` has a meaning."""
        return self.has_episodes

    @property
    def player(self) -> EnvironmentConfig | AgentConfig:
        """The environment or agent that plays episodes; unused where there are none."""
        return self.agent if self.agent.used else self.environment

    @property
    def scores(self) -> bool:
        """Return whether scorers give rewards; an environment or agent alone has its own."""
        return bool(self.reward) or not self.has_episodes

    @property
    def scorers(self) -> ScorerSettings:
        """Return the settings of scorer processes."""
        return ScorerSettings(task=self.task, rewards=self.reward, scoring=self.scoring)

    def eval_sets(self) -> list[EvalSet]:
        """The evaluation sets, each with its settings."""
        return self.eval.resolved_sets(self.sampling, heldout=self.task.heldout_share > 0)

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates per batch, over all epochs."""
        return self.schedule.updates_per_batch * self.algorithm.epochs

    @property
    def evaluates_blocking(self) -> bool:
        """Return whether training waits for evaluations on the way (`eval.blocking`)."""
        if self.eval.blocking is not None:
            return self.eval.blocking
        return self.schedule.boundary == "drain" or self.engines.placement == "colocated"

    @property
    def resolved_schedule(self) -> ScheduleConfig:
        """The schedule with what follows from other sections."""
        schedule, found = self.schedule, {}
        if schedule.expected_tokens is None:
            found["expected_tokens"] = max(1, self.sampling.max_new_tokens // 2)
        open_episodes = (schedule.open_episodes or "auto") if self.has_episodes else None
        return schedule.model_copy(update={**found, "open_episodes": open_episodes})

    def check(self) -> None:
        check_labels(self.reward)
        one = "/" not in self.name and self.name not in (".", "..") and self.name.isprintable()
        if not one or len(self.name.encode()) > _LONGEST_NAME:
            raise ValueError(
                f"name is {short_repr(self.name)}; it must be the name of one directory, printable "
                f"and of at most {_LONGEST_NAME} bytes, which is made in root {self.root!r}: set "
                "root to have it elsewhere"
            )
        limit = self.engines.max_total_tokens
        if limit is not None and self.sampling.max_new_tokens >= limit:
            raise ValueError(
                f"sampling.max_new_tokens {self.sampling.max_new_tokens} does not fit into "
                f"engines.max_total_tokens {limit}: lower the first or raise the second"
            )
        self._check_simulated_engines()
        self._check_colocated()
        self._check_episodes()
        if self.task.kind == "seeds" and not self.has_episodes:
            raise ValueError(
                "task.kind seeds has no prompts of its own: set environment.name or agent"
            )
        longest = max(self.experiment.forced_lengths, default=0)
        if longest > self.sampling.max_new_tokens or min(self.experiment.forced_lengths or [1]) < 1:
            raise ValueError(
                f"experiment.forced_lengths must lie in 1..{self.sampling.max_new_tokens} "
                f"(sampling.max_new_tokens), got up to {longest}"
            )

    def _check_episodes(self) -> None:
        if self.schedule.open_episodes is not None and not self.opens_episodes:
            raise ValueError("schedule.open_episodes needs environment.name or agent, got none")
        if not self.has_episodes:
            refuse_changed(self.episode, "episode", "environment.name, agent.name or agent.command")
        if self.agent.used and self.environment.used:
            raise ValueError(
                f"{self.agent.display_name} and {self.environment.display_name} are both set: an "
                "episode is played by one of them"
            )
        rapid = (self.algorithm.loss.name, self.algorithm.advantage.estimator)
        if self.agent.used and "rapid" in rapid:
            raise ValueError(
                f"algorithm.loss.name {rapid[0]} with algorithm.advantage.estimator {rapid[1]} has "
                f"one weight for a whole response, and {self.agent.display_name} may branch: use "
                "another recipe"
            )
        share = self.algorithm.overlong.buffer_share
        if self.has_episodes and share > 0:
            raise ValueError(
                "algorithm.overlong shapes the length of one response, and with "
                f"{self.player.display_name} there are many: set algorithm.overlong.buffer_share "
                f"0, got {share:g}"
            )

    def _check_colocated(self) -> None:
        if self.engines.placement != "colocated":
            return
        needed = {
            "schedule.overlap": (self.schedule.overlap, False),
            "weights.transport": (self.weights.transport, "tensor"),
            "engines.kind": (self.engines.kind, "sglang"),
            "parallel.nodes": (self.parallel.nodes, 1),
            "eval.blocking": (self.evaluates_blocking, True),
        }
        for name, (value, wanted) in needed.items():
            if value != wanted:
                raise ValueError(
                    f"engines.placement colocated (generation and training take turns on the same "
                    f"devices of one node) needs {name} {wanted}, got {value}"
                )
        used = self.engines.count * self.engines.tensor
        if used > self.parallel.ranks:
            raise ValueError(
                "engines.placement colocated puts engines on the GPUs of trainer ranks: "
                f"engines.count x engines.tensor is {used}, parallel.ranks {self.parallel.ranks}; "
                "set engines.count or engines.tensor lower"
            )

    def _check_simulated_engines(self) -> None:
        if self.engines.kind != "simulated":
            return
        if self.weights.transport not in ("tensor", "disk"):
            raise ValueError(
                "engines.kind simulated takes weights.transport tensor or disk, got "
                f"{self.weights.transport}"
            )
        if self.weights.verify != "never":
            raise ValueError(
                "engines.kind simulated runs no model that the probe could be compared with: set "
                f"weights.verify: never, got {self.weights.verify}"
            )

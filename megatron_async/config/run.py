"""Provides `RunConfig`, which contains all settings of a run, and its sections for checkpoints,
`sft`, telemetry and measurements."""

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
_LONGEST_NAME: Final = 200  # A file name may have 255 bytes. The other 55 are for suffixes.


class CheckpointConfig(Settings):
    """When checkpoints are written, how long that may take, and how many are kept."""

    every_steps: int = Field(10, ge=1)
    """Number of steps between two checkpoints."""
    keep: int = Field(2, ge=1)
    """Number of the newest complete checkpoints that stay on disk; older ones are deleted."""
    asynchronous: bool = True
    """Whether checkpoints are written while training continues."""
    timeout_seconds: float = Field(1800.0, gt=0)
    """Time limit of writing one checkpoint, in seconds."""
    write_gb_per_s: float = Field(5.0, gt=0)
    """Rate at which the file system reads and writes the data of all nodes together, in 1e9 bytes/s
    (assumed). It determines how long before Slurm's time limit the run stops, so that its last
    checkpoint is complete."""
    export_hf: bool = True
    """Whether the weights are exported as a Hugging Face checkpoint at the end of the run."""


class TeacherConfig(Settings):
    """Sampling of worked answers from a teacher (`sft --from-teacher`)."""

    samples: int = Field(5, ge=1)
    """Number of responses per prompt."""
    temperature: float = Field(0.7, gt=0)
    """Sampling temperature."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus sampling: smallest total probability of the tokens to sample from."""
    prompts: int = Field(0, ge=0)
    """Number of training prompts; 0 = all prompts of the files."""
    min_reward: float = 1.0
    """Smallest reward of responses that are kept."""
    epochs: int = Field(3, ge=1)
    """Number of times that each kept response is trained on."""
    model: str = ""
    """Name of the model in requests to the teacher, if `--from-teacher` is the address of a
    service."""
    api_key_env: str = ""
    """Name of the environment variable that contains the API key of the teacher's service."""


class SFTConfig(Settings):
    """Supervised fine-tuning on worked answers, of the task or from files."""

    steps: int | None = Field(None, ge=1)
    """Number of batches, with one optimizer step each. If it is not set, it is derived from
    `epochs`, otherwise 200."""
    epochs: int = Field(0, ge=0)
    """Number of times that each example is trained on; 0 = the examples are repeated until `steps`
    is reached."""
    batch_sequences: int = Field(64, ge=1)
    """Number of examples per step."""
    examples: int = Field(20000, ge=1)
    """Largest number of different worked answers to train on. If `data` is set, its first rows are
    used, up to this number."""
    data: str = ""
    """File or directory of examples: rows with `prompt` and `response`, or rows with chat
    `messages`, of which the assistant's messages are trained on. Empty = the task's own worked
    answers."""
    split: str = ""
    """Split to read from a directory."""
    layout: LAYOUTS = "rows"
    """Columns of a published data set (docs/data.md)."""
    columns: ColumnsConfig = ColumnsConfig()
    """Columns that have other names than in the layout."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of fine-tuning."""
    teacher: TeacherConfig = TeacherConfig()
    """Settings of `--from-teacher`."""

    def check(self) -> None:
        if self.steps is not None and self.epochs:
            raise ValueError(
                f"sft.steps is {self.steps} and sft.epochs is {self.epochs}; each follows from the "
                "other. Remove one of them."
            )

    @property
    def batches(self) -> int:
        """Number of batches to train on, which is also the length of the learning-rate schedule.
        With `epochs`, there are fewer batches if `data` has fewer than `examples` rows."""
        if self.epochs:
            return math.ceil(self.epochs * self.examples / self.batch_sequences)
        return self.steps or _SFT_STEPS

    def file(self) -> FileConfig | None:
        """Return the file of `data`; None if the task's own worked answers are used."""
        if not self.data:
            return None
        return FileConfig(
            path=self.data, split=self.split, layout=self.layout, columns=self.columns
        )


class TrackerConfig(Settings):
    """A tracker, to which the run reports its metrics."""

    name: str
    """tensorboard, wandb, mlflow, or your own Tracker (package.module:Class or file.py:Class)."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the tracker (docs/data.md#trackers)."""


class TelemetryConfig(Settings):
    """Records and displays of a run while it runs: metrics, scheduler events, progress."""

    trackers: Annotated[list[TrackerConfig], BeforeValidator(listed)] = Field(
        default_factory=lambda: [TrackerConfig(name="tensorboard")]
    )
    """Trackers of the run, each as its name or as a mapping; [] = none."""
    record_events: bool = True
    """Whether the events that the scheduler receives are recorded, so that command `replay` can
    check the scheduler's decisions."""
    progress: Literal["auto", "live", "lines", "off"] = "auto"
    """Display of progress on the terminal."""


class ExperimentConfig(Settings):
    """Settings that remove differences between two runs whose speed is compared (docs/semantics.md
    section 6)."""

    forced_lengths: list[int] = Field(default_factory=list)
    """Response lengths in tokens that are enforced: trajectory number i gets the element with index
    i % len(forced_lengths). Empty = lengths are not enforced."""


class RunConfig(Settings):
    """All settings of a run, which `megatron-async train --config FILE` starts."""

    name: str = Field("run", min_length=1, max_length=_LONGEST_NAME)
    """Name of the run directory under `root`: at most 200 bytes, printable, without `/`."""
    root: str = "runs"
    """Directory in which run directories are created."""
    seed: int = Field(1, ge=0)
    """Seed of initialization, prompts and shuffling."""
    steps: int = Field(100, ge=1)
    """Number of rollout batches to train on."""
    cluster: Literal["auto", "local", "ray"] = "auto"
    """Where engines, scorers and the rollout manager run: as processes of this machine (`local`),
    or in a Ray cluster. `auto`: local on one machine, unless RAY_ADDRESS names a cluster."""
    model: ModelConfig = ModelConfig()
    """Model."""
    parallel: ParallelConfig = ParallelConfig()
    """Parallel layout."""
    trainer: TrainerConfig = TrainerConfig()
    """Trainer."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    task: TaskConfig = TaskConfig()
    """Prompts and their scoring."""
    reward: Annotated[list[RewardConfig], BeforeValidator(listed)] = Field(default_factory=list)
    """Rewards that score a response; empty = the task's own scorer."""
    scoring: ScoringConfig = ScoringConfig()
    """Limits of scorers."""
    environment: Annotated[EnvironmentConfig, BeforeValidator(named)] = EnvironmentConfig()
    """Environment that the policy interacts with over many turns."""
    agent: Annotated[AgentConfig, BeforeValidator(named)] = AgentConfig()
    """Program that calls the policy by the OpenAI chat API over many turns."""
    episode: EpisodeConfig = EpisodeConfig()
    """Episodes of the environment or the agent."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Scheduler."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages, correction and loss."""
    engines: EngineConfig = EngineConfig()
    """Inference engines."""
    weights: WeightsConfig = WeightsConfig()
    """Weight exchange."""
    store: StoreConfig = StoreConfig()
    """Trajectory store."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    sft: SFTConfig = SFTConfig()
    """`megatron-async sft`."""
    eval: EvalConfig = EvalConfig()
    """`megatron-async eval`."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Metrics and logs."""
    experiment: ExperimentConfig = ExperimentConfig()
    """Settings of measurements."""

    _explicit: dict[str, Any] | None = PrivateAttr(default=None)

    @property
    def explicit(self) -> Mapping[str, Any]:
        """The settings that a file, the command line or Python has set, as a nested mapping.
        Recipes and presets never replace them."""
        return (
            self.model_dump(mode="json", exclude_unset=True)
            if self._explicit is None
            else self._explicit
        )

    def with_explicit(self, explicit: Mapping[str, Any]) -> Self:
        """Return a copy of these settings, of which only those in `explicit` count as set by a
        file, the command line or Python. The values do not change."""
        config = self.model_copy()
        config._explicit = dict(explicit)
        return config

    def with_section(self, section: str, **settings: Any) -> Self:
        """Return the settings with changed values in one section; the changes are not checked."""
        changed = getattr(self, section).model_copy(update=settings)
        return self.model_copy(update={section: changed})

    @property
    def has_episodes(self) -> bool:
        """Whether trajectories are episodes of an environment or an agent."""
        return self.player.used

    @property
    def opens_episodes(self) -> bool:
        """Whether there are episodes, whose number `schedule.open_episodes` limits. A simulation
        may have them without an environment."""
        return self.has_episodes

    @property
    def player(self) -> EnvironmentConfig | AgentConfig:
        """Settings of the agent or environment that plays episodes. If the run has neither, their
        property `used` is false."""
        return self.agent if self.agent.used else self.environment

    @property
    def scores(self) -> bool:
        """Whether scorer processes compute rewards. They do not if there are episodes and `reward`
        is not set: the environment or agent then gives the rewards."""
        return bool(self.reward) or not self.has_episodes

    @property
    def scorers(self) -> ScorerSettings:
        """Settings of the scorer processes."""
        return ScorerSettings(task=self.task, rewards=self.reward, scoring=self.scoring)

    def eval_sets(self) -> list[EvalSet]:
        """Return the evaluation sets with their settings."""
        return self.eval.resolved_sets(self.sampling, heldout=self.task.heldout_share > 0)

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates per batch, over all epochs."""
        return self.schedule.updates_per_batch * self.algorithm.epochs

    @property
    def evaluates_blocking(self) -> bool:
        """Whether training waits for evaluations during training (`eval.blocking`)."""
        if self.eval.blocking is not None:
            return self.eval.blocking
        return self.schedule.stops_generation or self.engines.placement == "colocated"

    @property
    def resolved_schedule(self) -> ScheduleConfig:
        """The schedule, with the defaults of `expected_tokens` and `open_episodes` that follow from
        other sections."""
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
                "root to create it elsewhere"
            )
        limit = self.engines.max_total_tokens
        if limit is not None and self.sampling.max_new_tokens >= limit:
            raise ValueError(
                f"sampling.max_new_tokens {self.sampling.max_new_tokens} does not fit into "
                f"engines.max_total_tokens {limit}. Lower the first or raise the second."
            )
        self._check_simulated_engines()
        self._check_colocated()
        if self.schedule.boundary == "pause" and not self.evaluates_blocking:
            raise ValueError(
                "eval.blocking is false and schedule.boundary is pause; engines are paused while "
                "the trainer works and could not generate for an evaluation. Set eval.blocking: "
                "true."
            )
        self._check_episodes()
        if self.task.kind == "seeds" and not self.has_episodes:
            raise ValueError(
                "task.kind is seeds, which has no prompts; set environment.name or agent"
            )
        longest = max(self.experiment.forced_lengths, default=0)
        if longest > self.sampling.max_new_tokens or min(self.experiment.forced_lengths or [1]) < 1:
            raise ValueError(
                f"experiment.forced_lengths must lie in 1..{self.sampling.max_new_tokens} "
                f"(sampling.max_new_tokens), got up to {longest}"
            )

    def _check_episodes(self) -> None:
        if self.schedule.open_episodes is not None and not self.opens_episodes:
            raise ValueError("schedule.open_episodes is set; it requires environment.name or agent")
        if not self.has_episodes:
            refuse_changed(self.episode, "episode", "environment.name, agent.name or agent.command")
        if self.agent.used and self.environment.used:
            raise ValueError(
                f"{self.agent.display_name} and {self.environment.display_name} are both set; "
                "set only one of them"
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
                f"algorithm.overlong.buffer_share is {share:g}; it shapes the length of a single "
                f"response, but {self.player.display_name} has many. Set it to 0."
            )

    def _check_colocated(self) -> None:
        if self.engines.placement != "colocated":
            return
        if self.schedule.boundary == "pause":
            raise ValueError(
                "engines.placement is colocated and schedule.boundary is pause; paused requests "
                "keep their KV cache on the GPUs, and the trainer needs this memory. Set "
                "schedule.boundary: abort."
            )
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
                    f"engines.placement is colocated (generation and training alternate on the "
                    f"same devices of one node), which needs {name} {wanted}, got {value}"
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
                "engines.kind is simulated, which needs weights.transport tensor or disk, got "
                f"{self.weights.transport}"
            )
        if self.weights.verify != "never":
            raise ValueError(
                f"engines.kind is simulated and weights.verify is {self.weights.verify}; simulated "
                "engines run no model that could be verified. Set weights.verify: never."
            )

"""Settings of tasks, sampling, engines, weight exchange and the trajectory store."""

from typing import Literal

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.config.data import DataConfig
from megatron_async.config.sampling_contract import (
    LARGEST_TEMPERATURE,
    LEAST_TEMPERATURE,
    check_extra_args,
    temperature_fits,
)

_KEPT_FREE = 6


class TaskConfig(DataConfig):
    """Source of prompts, and scoring of responses."""

    answer_marker: str = ""
    """The answer is what follows its last occurrence; empty: the last `<answer>...</answer>`, else
    the last \\boxed{...}, else the text after `</think>`."""
    full_score_only: bool = True
    """Reward 1 for the scorer's full score, else 0; false: its own score."""
    scorer_timeout_seconds: float = Field(10.0, gt=0)
    """Limit of one score."""
    on_scorer_timeout: Literal["zero", "regenerate", "drop"] = "zero"
    """A score past its limit, or whose process died twice: reward 0; or the response is generated
    again and its group waits (schedule.max_regenerations); or its group is dropped."""
    scorer_workers: int = Field(8, ge=1)
    """Most scorer processes; as many run as their queue needs."""


class SamplingConfig(Settings):
    """Sampling of training rollouts."""

    temperature: float = 1.0
    """Sampling temperature, 0.01 to 100: log-probs are at this temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; < 1 biases the behavior policy."""
    top_k: int = -1
    """Top-k; -1 = off; else biases the behavior policy."""
    max_new_tokens: int = Field(1024, ge=1)
    """Longest response."""
    allow_biased_behavior: bool = False
    """Accept top_p < 1 or top_k: reported log-probs are those before the cut."""

    def check(self) -> None:
        """Refuse settings under which log-probs do not describe what engines sample from."""
        if not temperature_fits(self.temperature):
            raise ValueError(
                f"sampling.temperature must lie between {LEAST_TEMPERATURE:g} and "
                f"{LARGEST_TEMPERATURE:g}, got {self.temperature:g}: beyond, log-probs are not "
                "those that tokens are drawn with"
            )
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"sampling.top_k must be -1 (off) or at least 1, got {self.top_k}")
        if (self.top_p < 1 or self.top_k != -1) and not self.allow_biased_behavior:
            raise ValueError(
                f"sampling.top_p {self.top_p} / top_k {self.top_k} make the behavior policy "
                "differ from its log-probs; set sampling.allow_biased_behavior: true to accept "
                "that"
            )
        if self.top_k == 1 and self.temperature != 1:
            raise ValueError(
                "sampling.top_k 1 decodes greedily, with log-probs of temperature 1: set "
                f"sampling.temperature 1, got {self.temperature:g}, or a larger top_k"
            )


class SimulatedEngineConfig(Settings):
    """Behavior of `engines.kind: simulated`, which runs no model."""

    mean_length: int = Field(64, ge=1)
    """A response ends at each token with 1 / this."""
    step_seconds: float = Field(0.005, ge=0)
    """Duration of a decode step."""
    seconds_per_request: float = Field(0.0, ge=0)
    """... and as much more for each running request."""


class EngineConfig(Settings):
    """Inference engines: how many, how they are started, and when one counts as dead."""

    kind: Literal["sglang", "simulated"] = "sglang"
    """`simulated`: made-up tokens behind the same endpoints, for crash tests of the processes
    around it; needs `weights.transport` tensor or disk, and `weights.verify: never`."""
    simulated: SimulatedEngineConfig = SimulatedEngineConfig()
    """Tokens and speed of `kind: simulated`."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Devices of their own, or those of the trainer: then generation and training alternate, and
    each gives the memory to the other."""
    quantization: Literal["none", "fp8"] = "none"
    """`fp8`: weights go to the engines in blocks of 128 x 128 with a scale."""
    count: int = Field(1, ge=1)
    """Engines."""
    tensor: int = Field(1, ge=1)
    """TP size of one engine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda if present."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """float32 on CPU, bfloat16 on GPU."""
    max_total_tokens: int | None = 65536
    """KV capacity in tokens; none = SGLang decides from memory."""
    max_running_requests: int | None = None
    """Requests in one decode batch."""
    cuda_graph_batch: int | None = Field(None, ge=1)
    """Largest decode batch that runs from a CUDA graph; none = SGLang decides from memory, and
    larger batches run without. Unset on GPUs: schedule.concurrency / engines."""
    context_length: int | None = None
    """Longest prompt + response."""
    stream_interval: int = Field(64, ge=1)
    """Tokens of a response that an engine reports at once; a chunk."""
    nvls: bool | None = None
    """NVLink SHARP of NCCL in trainer ranks and engines alike, where the GPUs have it: faster sums
    inside a node, more memory for each communicator. Unset: on, but for colocated engines."""
    extra_args: list[str] = Field(default_factory=list)
    """More SGLang arguments; those that have a setting here, or that would make log-probs differ
    from what is sampled, are refused."""
    host: str = "127.0.0.1"
    """Address that servers bind to; `node`: that of the node each of them is on."""
    api_key: str = ""
    """Key that servers ask for; needed where hosts differ."""
    start_timeout_seconds: float = Field(240.0, gt=0)
    """Longest time until a started engine answers; unless set, 1,200 where engines use GPUs."""
    hang_timeout_seconds: float = Field(120.0, gt=0)
    """No token, or no answer, for this long: the engine is hung. Time in which it has no requests,
    is paused or receives weights does not count."""
    max_restarts: int = Field(3, ge=0)
    """Restarts of one engine, and of the rollout manager, before the run stops."""

    @property
    def health_interval_seconds(self) -> float:
        """Seconds between two health checks; a hang is only found at one of them."""
        return min(5.0, self.hang_timeout_seconds / 24)

    @property
    def silence_seconds(self) -> float:
        """Longest silence of one response while its engine works and has no queue.

        It is well above `hang_timeout_seconds`, since a hung engine would otherwise look like many
        lost responses. A response that is silent for longer is cut off there and resumed.
        """
        return 5 * self.hang_timeout_seconds

    @property
    def uses_nvls(self) -> bool:
        """Return whether NCCL may use NVLS."""
        return self.placement == "disaggregated" if self.nvls is None else self.nvls

    def max_sequence_tokens(self, model_context: int | None) -> int | None:
        """Tokens of prompt and response that an engine takes, None when that is not known.

        SGLang keeps one token of its context or cache free, and five more of every input, which a
        resumed response is part of.
        """
        limits = (self.context_length or model_context, self.max_total_tokens)
        known = [limit for limit in limits if limit is not None]
        return min(known) - _KEPT_FREE if known else None

    def check(self) -> None:
        check_extra_args(self.extra_args)


class WeightsConfig(Settings):
    """Transport of policy weights to the engines, and its verification."""

    transport: Literal["distributed", "tensor", "disk", "delta"] = "distributed"
    """Collective broadcast, same-host tensors, files, or differences."""
    directory: str = ""
    """Where `disk` and `delta` publish; the engines' hosts must see it under the same name. Empty:
    `weights` in the run directory."""
    bucket_mib: int = Field(512, ge=1)
    """Size of one bucket, MiB."""
    verify: Literal["every", "first", "never"] = "every"
    """Updates after which checksums, and ratios of tokens that each engine samples, are
    compared."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean |engine - trainer| log-prob of them. Unset: 1e-4 where all compute in float32;
    else learned in the first updates (docs/weights.md)."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Limit of one whole update."""


class StoreConfig(Settings):
    """The durable trajectory store."""

    directory: str = Field("", pattern="^(/.*)?$")
    """Where its database lies on the rollout manager's node, an absolute path; empty: in the run
    directory where that is on a local disk, else below TMPDIR."""
    compact_after_checkpoints: int = Field(4, ge=1)
    """Consumed trajectories are exported and removed after this many."""
    export: Literal["none", "jsonl"] = "jsonl"
    """Form of exported trajectories."""

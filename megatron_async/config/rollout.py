"""Settings of tasks, sampling, engines, weight exchange and the trajectory store."""

from typing import Literal

from pydantic import Field

from megatron_async.config.base import Settings
from megatron_async.config.data import DataConfig
from megatron_async.config.sampling_contract import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    check_extra_args,
    temperature_fits,
)

_KEPT_FREE = 6


class TaskConfig(DataConfig):
    """Settings of the task: where prompts come from, and how responses are scored."""

    answer_marker: str = ""
    """Mark before the answer: the answer is the text after the mark's last occurrence. Empty = no
    mark; the text up to the last `</think>` is then ignored, and the answer is the last
    `<answer>...</answer>`, otherwise the last \\boxed{...}, otherwise the whole remaining text."""
    full_score_only: bool = True
    """Whether the scorer of a generated task (chain_sum or reasoning_gym) gives reward 1 for the
    full score and 0 otherwise. With false, the reward is the score itself."""
    scorer_timeout_seconds: float = Field(10.0, gt=0)
    """Time limit of one score, in seconds."""
    on_scorer_timeout: Literal["zero", "regenerate", "drop"] = "zero"
    """Treatment of a response whose score takes longer than its time limit, whose scorer process
    died twice, or whose reward service cannot be reached. `zero`: reward 0. `regenerate`: the
    response is generated again while its group waits (schedule.max_regenerations). `drop`: its
    group is dropped."""
    scorer_workers: int = Field(8, ge=1)
    """Largest number of scorer processes. Processes are added and removed with the length of the
    queue."""


class SamplingConfig(Settings):
    """Sampling of training rollouts."""

    temperature: float = 1.0
    """Sampling temperature, 0.01 to 100. Engines and trainer compute log-probs at this
    temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: smallest total probability of the tokens to sample from. Below 1, engines
    sample from another distribution than the log-probs describe (allow_biased_behavior)."""
    top_k: int = -1
    """Number of most probable tokens to sample from; -1 = all. With other values, engines sample
    from another distribution than the log-probs describe (allow_biased_behavior)."""
    max_new_tokens: int = Field(1024, ge=1)
    """Longest response, in tokens."""
    allow_biased_behavior: bool = False
    """Whether top_p < 1 and top_k are accepted, although log-probs do not include their
    truncation."""

    def check(self) -> None:
        """Check that the log-probs of engines describe the distribution that they sample from."""
        if not temperature_fits(self.temperature):
            raise ValueError(
                f"sampling.temperature must lie between {MIN_TEMPERATURE:g} and "
                f"{MAX_TEMPERATURE:g}, got {self.temperature:g}; outside this range, the log-probs "
                "of an engine do not describe the distribution that it samples from"
            )
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(
                f"sampling.top_k must be -1 (all tokens) or at least 1, got {self.top_k}"
            )
        if (self.top_p < 1 or self.top_k != -1) and not self.allow_biased_behavior:
            raise ValueError(
                f"sampling.top_p {self.top_p} / top_k {self.top_k} make the behavior policy "
                "differ from its log-probs; set sampling.allow_biased_behavior: true to accept "
                "that"
            )
        if self.top_k == 1 and self.temperature != 1:
            raise ValueError(
                f"sampling.top_k is 1 and sampling.temperature is {self.temperature:g}; greedy "
                "decoding has log-probs of temperature 1. Set sampling.temperature 1, or a larger "
                "top_k."
            )


class SimulatedEngineConfig(Settings):
    """Behavior of `engines.kind: simulated`, which runs no model."""

    mean_length: int = Field(64, ge=1)
    """Mean length of a response, in tokens. The response ends after each token with probability 1 /
    mean_length."""
    step_seconds: float = Field(0.005, ge=0)
    """Duration of a decode step, in seconds."""
    seconds_per_request: float = Field(0.0, ge=0)
    """Additional duration of a decode step for each running request, in seconds."""


class EngineConfig(Settings):
    """Inference engines: their number, how they are started, and when one counts as dead."""

    kind: Literal["sglang", "simulated"] = "sglang"
    """Kind of engine. `simulated`: artificial tokens behind the same endpoints, for crash tests of
    the other processes; it requires `weights.transport` tensor or disk, and `weights.verify:
    never`."""
    simulated: SimulatedEngineConfig = SimulatedEngineConfig()
    """Tokens and speed of `kind: simulated`."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Devices of the engines: separate ones (`disaggregated`), or those of the trainer
    (`colocated`). If they are colocated, generation and training alternate, and each releases its
    GPU memory before the other starts."""
    quantization: Literal["none", "fp8"] = "none"
    """Precision of the engines' linear layers. `fp8`: the trainer sends these weights in FP8, with
    a scale for each block of 128 x 128."""
    count: int = Field(1, ge=1)
    """Number of inference engines."""
    tensor: int = Field(1, ge=1)
    """Number of GPUs of one engine (tensor parallel size)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device. `auto`: cuda if a GPU is present."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. `auto`: float32 on CPU, bfloat16 on GPU."""
    max_total_tokens: int | None = 65536
    """Capacity of the KV cache of one engine, in tokens; none = SGLang derives it from the free
    memory."""
    max_running_requests: int | None = None
    """Largest number of requests in one decode batch; none = no limit."""
    cuda_graph_batch: int | None = Field(None, ge=1)
    """Largest decode batch that runs from a CUDA graph, in requests; larger batches run without a
    graph. none = SGLang derives it from the memory. If it is not set and engines run on GPUs, it is
    schedule.concurrency divided by the number of engines, or none with `concurrency: auto`."""
    context_length: int | None = None
    """Largest total length of a prompt and its response, in tokens; none = the model's context
    length."""
    stream_interval: int = Field(64, ge=1)
    """Number of tokens of a response that an engine generates between two reports to the manager.
    The tokens of a report are called a chunk."""
    nvls: bool | None = None
    """Whether NCCL uses NVLink SHARP in trainer ranks and engines, if the GPUs have it. It makes
    sums inside a node faster, but each communicator needs more memory. If it is not set, it is used
    unless engines are colocated."""
    extra_args: list[str] = Field(default_factory=list)
    """Further SGLang arguments. Some are refused, mainly those that have a setting here, and those
    with which log-probs would describe another distribution than the engine samples from."""
    host: str = "127.0.0.1"
    """Address that servers bind to; `node` = the address of each server's own node."""
    api_key: str = ""
    """Key that clients of the servers must send; required if servers can be reached from other
    hosts."""
    start_timeout_seconds: float = Field(240.0, gt=0)
    """Longest time from the start of an engine to its first reply, in seconds. If it is not set, it
    is 1,200 for engines on GPUs."""
    hang_timeout_seconds: float = Field(120.0, gt=0)
    """Time without a token or a reply after which an engine counts as hung, in seconds. Time in
    which it has no requests, is paused or receives weights does not count."""
    max_restarts: int = Field(3, ge=0)
    """Number of restarts of one engine, and of the rollout manager, before the run stops."""

    @property
    def health_interval_seconds(self) -> float:
        """Seconds between two health checks of an engine. Only a health check detects that an
        engine hangs."""
        return min(5.0, self.hang_timeout_seconds / 24)

    @property
    def silence_seconds(self) -> float:
        """Longest time without a new token of one response, in seconds, while its engine generates
        others and has no queue.

        After this time the response counts as lost: its request is aborted and resumed. The limit
        is five times `hang_timeout_seconds`, so that an engine which hangs is detected as such,
        before all its responses count as lost.
        """
        return 5 * self.hang_timeout_seconds

    @property
    def uses_nvls(self) -> bool:
        """Whether NCCL may use NVLink SHARP, with the default of `nvls` filled in."""
        return self.placement == "disaggregated" if self.nvls is None else self.nvls

    def max_sequence_tokens(self, model_context: int | None) -> int | None:
        """Return the largest total number of tokens of a prompt and its response that an engine
        accepts; None if unknown.

        It is the smaller one of context length and `max_total_tokens`, minus 6. SGLang keeps one
        token of both free, and accepts inputs that are at least five tokens shorter still. The
        latter concerns responses too, because a resumed response is part of the input.

        Args:
            model_context: Context length of the model, which applies if `context_length` is not
                set; None if unknown.
        """
        limits = (self.context_length or model_context, self.max_total_tokens)
        known = [limit for limit in limits if limit is not None]
        return min(known) - _KEPT_FREE if known else None

    def check(self) -> None:
        check_extra_args(self.extra_args)


class WeightsConfig(Settings):
    """Transport of policy weights to the engines, and its verification."""

    transport: Literal["distributed", "tensor", "disk", "delta"] = "distributed"
    """Transport of weights: collective broadcast (`distributed`), tensors on the same host, files
    on a shared `disk`, or differences between versions (`delta`)."""
    directory: str = ""
    """Directory in which `disk` and `delta` publish; the engines' hosts must have it under the same
    path. Empty = `weights` in the run directory."""
    bucket_mib: int = Field(512, ge=1)
    """Size of one bucket of weights, in MiB."""
    verify: Literal["every", "first", "never"] = "every"
    """Weight updates after which engines are verified. A verification compares checksums of the
    weights, and the log-probs of tokens that each engine samples with those of the trainer."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest accepted mean of |engine's log-prob - trainer's log-prob| over the sampled tokens of
    a verification. If it is not set, it is 1e-4 if engines and trainer compute in float32;
    otherwise it is derived from the differences after the first updates (docs/weights.md)."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Time limit of one whole weight update, in seconds."""


class StoreConfig(Settings):
    """The durable trajectory store."""

    directory: str = Field("", pattern="^(/.*)?$")
    """Directory of the database on the rollout manager's node, an absolute path. Empty = the run
    directory if that is on a local disk, otherwise below TMPDIR."""
    compact_after_checkpoints: int = Field(4, ge=1)
    """Number n of checkpoints for which trained trajectories stay in the database. After every
    checkpoint, compaction exports and removes groups that were trained on before the n-th newest
    checkpoint (the newest is number 1), or dropped. It keeps groups that a checkpoint which can
    still be restored may need."""
    export: Literal["none", "jsonl"] = "jsonl"
    """Format of exported trajectories; none = they are removed without export."""

"""Settings of the simulator and the planner. Every constant that they assume is one of these
settings.

The settings are the section `simulate` of a simulation file (`SimulationConfig`). Such a file also
contains a run's settings, or names the run's file as its `base:`. The file of a run cannot contain
this section.

"(assumed)" in a description means that the value comes from no data sheet; `megatron-async
simulate` prints all assumed values. Public numbers (peak rates, memory, links, model shapes) are in
`megatron_async/simulate/hardware.py` and `models/shape.py` and are selected by name.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_async.config.base import Settings
from megatron_async.config.run import RunConfig

GpuName = Literal["A100", "H100", "H800", "H200", "B200", "L40S", "A6000"]


class GpuConfig(Settings):
    """The GPU. If a setting is none, the figure in the GPU's data sheet is used."""

    name: GpuName = "H100"
    """Name of the GPU in the table of data sheets."""
    bf16_tflops: float | None = Field(None, gt=0)
    """Peak rate of dense bfloat16, in TFLOP/s."""
    memory_gb: float | None = Field(None, gt=0)
    """Size of the HBM, in 1e9 bytes."""
    memory_tb_per_s: float | None = Field(None, gt=0)
    """Bandwidth of the HBM, in 1e12 bytes/s."""
    nvlink_gb_per_s: float | None = Field(None, gt=0)
    """Bandwidth from one GPU to another GPU of its node, in one direction, in 1e9 bytes/s."""
    network_gb_per_s: float | None = Field(None, gt=0)
    """Bandwidth from one GPU to another node, in one direction, in 1e9 bytes/s."""
    pcie_gb_per_s: float | None = Field(None, gt=0)
    """Bandwidth from one GPU to host memory, in one direction, in 1e9 bytes/s."""


class EfficiencyConfig(Settings):
    """Assumed shares of peak rates that are reached, and assumed fixed costs of operations."""

    memory_bandwidth: float = Field(0.8, gt=0, le=1)
    """Share of the HBM's peak bandwidth that decoding reaches."""
    decode_flops: float = Field(0.6, gt=0, le=1)
    """Share of the GPU's peak FLOP rate that matrix products of decoding reach."""
    prefill_flops: float = Field(0.5, gt=0, le=1)
    """Share of the GPU's peak FLOP rate that prefill reaches."""
    training_flops: float = Field(0.35, gt=0, le=1)
    """Share of the GPU's peak FLOP rate that forward and backward passes of packed sequences
    reach."""
    links: float = Field(0.7, gt=0, le=1)
    """Share of the peak bandwidth of NVLink, network and PCIe that transfers reach."""
    weight_update: float = Field(0.43, gt=0, le=1)
    """Share of the network bandwidth that a whole weight update reaches (measured with gloo between
    two CPU cores: benchmarks/results/weights.md)."""
    reduction_overlap: float = Field(0.0, ge=0, le=1)
    """Share of the gradient reduction and parameter gathering that overlaps forward and backward
    passes, so that it takes no time."""
    collective_latency_seconds: float = Field(10e-6, ge=0)
    """Fixed cost of one all-reduce inside a node, in seconds."""
    decode_overhead_seconds: float = Field(0.003, ge=0)
    """Fixed time of one decode step for kernel launches, sampling and bookkeeping, in seconds."""
    update_overhead_seconds: float = Field(0.3, ge=0)
    """Fixed time of one optimizer step: parameter update, gradient norm and logging, in seconds."""
    batch_overhead_seconds: float = Field(2.0, ge=0)
    """Fixed time of one batch for its packing, advantages and transfer, in seconds."""
    weight_update_overhead_seconds: float = Field(1.0, ge=0)
    """Fixed time of one weight update for pausing engines, checksums and continuing, without the
    transfer, in seconds."""


class LengthConfig(Settings):
    """Distribution of response lengths in tokens, before sampling.max_new_tokens truncates them."""

    distribution: Literal["lognormal", "weibull", "uniform", "constant", "file"] = "lognormal"
    """Distribution of lengths. `file`: the empirical distribution of recorded lengths;
    `megatron-async fit-lengths` fits lognormal and weibull to them."""
    median: float | None = Field(None, gt=0)
    """Median of the log-normal distribution, or the constant length, in tokens; none = a quarter of
    sampling.max_new_tokens (assumed)."""
    sigma: float = Field(0.9, gt=0)
    """Standard deviation of the logarithm of the length, for lognormal."""
    scale: float | None = Field(None, gt=0)
    """Scale (lambda) of the Weibull distribution, in tokens; none = a third of
    sampling.max_new_tokens (assumed). For uniform, the largest length; none =
    sampling.max_new_tokens."""
    shape: float = Field(1.0, gt=0)
    """Shape (k) of the Weibull distribution; below 1 = heavy tail."""
    path: str = ""
    """File with recorded lengths: one per line, a JSON list, or JSONL (docs/simulator.md)."""
    prompt_correlation: float = Field(0.5, ge=0, lt=1)
    """Correlation between the lengths of two responses to the same prompt, after the lengths were
    transformed to normal scores."""
    prompt_tokens: int = Field(200, ge=1)
    """Length of a prompt, in tokens."""

    def check(self) -> None:
        if self.distribution == "file" and not self.path:
            raise ValueError("distribution is file; set simulate.lengths.path too")


class SimulatedEpisodeConfig(Settings):
    """Episodes of many turns. `simulate.lengths` then describes the response of one turn."""

    turns: float | None = Field(None, ge=1)
    """Mean number of turns of an episode; none = no environment."""
    spread: Literal["geometric", "constant"] = "geometric"
    """Distribution of the number of turns."""
    max_turns: int = Field(32, ge=1)
    """Number of turns after which an episode ends in any case."""
    tool_seconds: float = Field(1.0, ge=0)
    """Median time of one reply of the environment, including the first one, in seconds."""
    tool_sigma: float = Field(0.0, ge=0)
    """Standard deviation of the logarithm of the time of one reply of the environment."""
    observation_tokens: int = Field(100, ge=1)
    """Number of tokens that a reply of the environment adds to the episode."""


class SimulatedRewardConfig(Settings):
    """Rewards. They affect the simulation only through the duration of scores and, with
    `schedule.dynamic_sampling`, through groups that are dropped because all their rewards are
    equal."""

    success_alpha: float = Field(0.5, gt=0)
    """Alpha of the Beta(alpha, beta) distribution of a prompt's success rate."""
    success_beta: float = Field(0.5, gt=0)
    """Beta of the Beta(alpha, beta) distribution of a prompt's success rate."""
    scorer_seconds: float = Field(0.05, ge=0)
    """Duration of one score, in seconds; at most task.scorer_workers scores run at once."""


class SimulateConfig(Settings):
    """Settings of `megatron-async simulate` and `plan`, in addition to the run's own."""

    model: str = ""
    """Name of a public model whose shape is simulated (docs/simulator.md); empty = the model in
    model.path."""
    gpu: GpuConfig = GpuConfig()
    """The GPU."""
    gpus: int | None = Field(None, ge=1)
    """For `plan`, total number of GPUs of the planned layouts; none = the number in the layout that
    the file sets or, if it sets none, one node."""
    gpus_per_node: int = Field(8, ge=1)
    """Number of GPUs of a node, which NVLink connects."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """GPUs of trainers and engines: separate GPUs (`disaggregated`), or all GPUs for both, which
    then alternate (`colocated`). If this is not set and engines.placement is colocated, it is
    colocated and `offload` is true."""
    offload: bool = False
    """With `placement: colocated`, whether the trainer's state is moved to host memory while
    engines generate. With false it stays on the GPUs, and the KV cache gets only the remaining
    memory."""
    lengths: LengthConfig = LengthConfig()
    """Response lengths."""
    episode: SimulatedEpisodeConfig = SimulatedEpisodeConfig()
    """Episodes."""
    reward: SimulatedRewardConfig = SimulatedRewardConfig()
    """Rewards."""
    efficiency: EfficiencyConfig = EfficiencyConfig()
    """Assumed shares of peak rates, and overheads."""
    cost_model: str = ""
    """YAML file with an engine's measured times, made by `profile-engine`. It replaces the engine's
    roofline model; empty = the roofline model."""
    engine_memory_share: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's HBM that an engine uses for its weights and KV cache (assumed)."""
    trainer_memory_share: float = Field(0.8, gt=0, le=1)
    """Share of a trainer GPU's memory that the estimated peak may use (assumed). `plan` rejects
    layouts that exceed it, and the default of trainer.recompute is chosen so that the run does
    not."""
    kv_capacity_tokens: int | None = Field(None, ge=1)
    """Capacity of the KV cache of one engine, in tokens; none = the capacity in `cost_model` or,
    without one, as many tokens as fit into the memory."""
    prefill_pass_tokens: int = Field(8192, ge=1)
    """Largest number of tokens of one prefill pass, of all its requests together (SGLang's
    chunked_prefill_size on GPUs with 60 to 160 GB)."""
    admission_reserve_tokens: int = Field(400, ge=0)
    """Number of free KV tokens per running request that an engine requires before it admits another
    request (assumed). SGLang estimates this reserve as its new-token ratio, at least 0.1, times the
    remaining tokens of a request, at most 4,096; 0.1 * 4,096 is about 400."""
    retract_steps: int = Field(20, ge=1)
    """Number of decode steps for which a preemption frees enough KV cache (SGLang's value). A
    preemption removes requests from the decode batch when the KV cache is full."""
    training_flops_per_parameter: float = Field(6.0, gt=0)
    """FLOPs per token and parameter: 2 forward and 4 backward."""
    extra_forward_passes: float = Field(0.0, ge=0)
    """Number of forward passes without gradient per token, for example one each for pi_old, the
    reference policy and RAPID's weights."""
    padding: Literal["packed", "batch"] = "packed"
    """Tokens that the trainer computes. `packed`: only real tokens, as in this project's trainer.
    `batch`: every sequence is padded to the longest one of its batch, as in TRL, whose microbatches
    are slices of one padded tensor."""
    trainer_seconds_per_token: float | None = Field(None, gt=0)
    """Measured time of the trainer per token, in seconds, which replaces the trainer's roofline
    model; none = the roofline model."""
    trainer_seconds_per_update: float | None = Field(None, ge=0)
    """Measured fixed time of an optimizer step, in seconds; none = the estimated time of reducing
    gradients over ranks plus efficiency.update_overhead_seconds."""
    weight_update_seconds: float | None = Field(None, ge=0)
    """Measured time for which one weight update pauses engines, in seconds; none = an estimate from
    the size of the weights, the bandwidths and efficiency.weight_update_overhead_seconds. With
    background_publication, it is the time of the transfer instead."""
    background_publication: bool = False
    """Whether weights are sent while trainer and engines work. The trainer then stops only to copy
    the weights to host buffers, and engines pause only to load the received weights from host
    memory. The next update waits for the one under way."""
    steps: int = Field(30, ge=1)
    """Number of batches to simulate."""
    warmup_steps: int = Field(5, ge=0)
    """Number of batches at the start that are left out of the results."""
    chunk_tokens: int = Field(2048, ge=1)
    """Number of decode steps between two reports of an engine, each of which contains the new
    tokens of all running requests."""
    load_report_seconds: float = Field(5.0, gt=0)
    """Simulated time between two reports of an engine's load, in seconds."""

    def check(self) -> None:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"simulate.warmup_steps {self.warmup_steps} must be below simulate.steps "
                f"{self.steps}"
            )


class SimulationConfig(RunConfig):
    """All settings of a run and of its simulation, for `megatron-async simulate --config FILE` and
    `plan`."""

    simulate: SimulateConfig = SimulateConfig()
    """The simulated cluster and its assumptions."""

    @model_validator(mode="before")
    @classmethod
    def _placement(cls, values: Any) -> Any:
        """Default `simulate.placement` to colocated, and `simulate.offload` to true, if
        `engines.placement` is colocated."""
        engines, own = values.get("engines"), values.get("simulate", {})
        shared = isinstance(engines, dict) and engines.get("placement") == "colocated"
        if not shared or not isinstance(own, dict):
            return values
        return {**values, "simulate": {"placement": "colocated", "offload": True, **own}}

    @property
    def opens_episodes(self) -> bool:
        return self.has_episodes or self.simulate.episode.turns is not None


def simulation_of(config: RunConfig) -> SimulationConfig:
    """Return `config` with the section `simulate` at its defaults; return it unchanged if it has
    this section already."""
    if isinstance(config, SimulationConfig):
        return config
    # The settings are not checked again: the start of a run may have derived values that a check
    # refuses in a file.
    return SimulationConfig.model_construct(config.model_fields_set, **dict(config))

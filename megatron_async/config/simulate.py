"""Settings of the simulator and the planner; every constant that they assume is a setting here.

They are the section `simulate` of a simulation file (`SimulationConfig`), which also contains a
run's settings or names the run's file as its `base:`. A run's file cannot contain them.

"(assumed)" in a description means that the value comes from no data sheet; `megatron-async
simulate` prints all of them. Public numbers (peak rates, memory, links, model shapes) are in
`megatron_async/simulate/hardware.py` and `models/shape.py` and are selected by name.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_async.config.base import Settings
from megatron_async.config.run import RunConfig

GpuName = Literal["A100", "H100", "H800", "H200", "B200", "L40S", "A6000"]


class GpuConfig(Settings):
    """The GPU; values that are not set come from its data sheet."""

    name: GpuName = "H100"
    """Name of the GPU in the table of data sheets."""
    bf16_tflops: float | None = Field(None, gt=0)
    """Peak rate of dense bfloat16, in TFLOP/s."""
    memory_gb: float | None = Field(None, gt=0)
    """Size of the HBM, in 1e9 bytes."""
    memory_tb_per_s: float | None = Field(None, gt=0)
    """Bandwidth of the HBM, in 1e12 bytes/s."""
    nvlink_gb_per_s: float | None = Field(None, gt=0)
    """Bandwidth to another GPU of the node, in one direction, in 1e9 bytes/s."""
    network_gb_per_s: float | None = Field(None, gt=0)
    """Bandwidth to another node per GPU, in one direction, in 1e9 bytes/s."""
    pcie_gb_per_s: float | None = Field(None, gt=0)
    """Bandwidth to host memory, in one direction, in 1e9 bytes/s."""


class EfficiencyConfig(Settings):
    """Shares of peak rates that are reached, and additional costs of each step. All are assumed."""

    memory_bandwidth: float = Field(0.8, gt=0, le=1)
    """Share of the HBM bandwidth that decoding reaches."""
    decode_flops: float = Field(0.6, gt=0, le=1)
    """Share of the peak rate that matrix products of decoding reach."""
    prefill_flops: float = Field(0.5, gt=0, le=1)
    """Share of the peak rate that prefill reaches."""
    training_flops: float = Field(0.35, gt=0, le=1)
    """Share of the peak rate that forward and backward passes of packed sequences reach."""
    links: float = Field(0.7, gt=0, le=1)
    """Share of the bandwidth that is reached on NVLink, network and PCIe."""
    weight_update: float = Field(0.43, gt=0, le=1)
    """Share of the network bandwidth that a whole weight update reaches (measured with gloo between
    two CPU cores: benchmarks/results/weights.md)."""
    collective_latency_seconds: float = Field(10e-6, ge=0)
    """Fixed cost of one all-reduce inside a node, in seconds."""
    decode_overhead_seconds: float = Field(0.003, ge=0)
    """Launch, sampling and batch bookkeeping of one decode step, in seconds."""
    update_overhead_seconds: float = Field(0.3, ge=0)
    """Optimizer step, gradient norm and logging of one optimizer step, in seconds."""
    batch_overhead_seconds: float = Field(2.0, ge=0)
    """Packing, advantages and transfer of one batch, in seconds."""
    weight_update_overhead_seconds: float = Field(1.0, ge=0)
    """Pause, checksums and continuation of one weight update, without the transfer, in seconds."""


class LengthConfig(Settings):
    """Response lengths in tokens, before the limit `sampling.max_new_tokens` is applied."""

    distribution: Literal["lognormal", "weibull", "uniform", "constant", "file"] = "lognormal"
    """Distribution of lengths. `file`: the empirical distribution of recorded lengths;
    `megatron-async fit-lengths` fits lognormal and weibull to them."""
    median: float | None = Field(None, gt=0)
    """Median of the log-normal distribution, or the constant length, in tokens; none = a quarter of
    sampling.max_new_tokens (assumed)."""
    sigma: float = Field(0.9, gt=0)
    """Standard deviation of the logarithm of the length."""
    scale: float | None = Field(None, gt=0)
    """Scale (lambda) of the Weibull distribution, in tokens; none = a third of
    sampling.max_new_tokens (assumed). For uniform, the largest length; none =
    sampling.max_new_tokens."""
    shape: float = Field(1.0, gt=0)
    """Shape (k) of the Weibull distribution; below 1 = heavy tail."""
    path: str = ""
    """File with recorded lengths: one per line, a JSON list, or JSONL (docs/simulator.md)."""
    prompt_correlation: float = Field(0.5, ge=0, lt=1)
    """Correlation of the lengths within a prompt (of their normal scores)."""
    prompt_tokens: int = Field(200, ge=1)
    """Length of a prompt, in tokens."""

    def check(self) -> None:
        if self.distribution == "file" and not self.path:
            raise ValueError("distribution is file; set simulate.lengths.path too")


class SimulatedEpisodeConfig(Settings):
    """Episodes of many turns; `lengths` are then the lengths of one response."""

    turns: float | None = Field(None, ge=1)
    """Mean number of turns of an episode; none = no environment."""
    spread: Literal["geometric", "constant"] = "geometric"
    """Distribution of the number of turns."""
    max_turns: int = Field(32, ge=1)
    """Number of turns after which an episode ends."""
    tool_seconds: float = Field(1.0, ge=0)
    """Median time of one reply of the environment, including the first one, in seconds."""
    tool_sigma: float = Field(0.0, ge=0)
    """Standard deviation of the logarithm of that time."""
    observation_tokens: int = Field(100, ge=1)
    """Number of tokens that an environment adds in a turn."""


class SimulatedRewardConfig(Settings):
    """Rewards; they affect the simulation only through `schedule.dynamic_sampling` and their
    duration."""

    success_alpha: float = Field(0.5, gt=0)
    """Alpha of the Beta(alpha, beta) distribution of a prompt's success rate."""
    success_beta: float = Field(0.5, gt=0)
    """Beta of the Beta(alpha, beta) distribution of a prompt's success rate."""
    scorer_seconds: float = Field(0.05, ge=0)
    """Duration of one score, in seconds; at most task.scorer_workers scores run at once."""


class SimulateConfig(Settings):
    """Settings of `megatron-async simulate` and `plan`, in addition to the run's own."""

    model: str = ""
    """Name of a public model shape (see docs/simulator.md); empty = the shape of model.path."""
    gpu: GpuConfig = GpuConfig()
    """The GPU."""
    gpus: int | None = Field(None, ge=1)
    """For `plan`, total number of GPUs; none = those of the file's own layout, otherwise one
    node."""
    gpus_per_node: int = Field(8, ge=1)
    """Number of GPUs of a node, which NVLink connects."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """GPUs of trainers and engines: separate ones, or all GPUs for each alternately (`colocated`).
    If it is not set and engines.placement is colocated, it is colocated with `offload`."""
    offload: bool = False
    """If colocated, whether the trainer's state leaves its GPUs while engines generate. Otherwise
    it stays, and the KV cache gets the remaining memory."""
    lengths: LengthConfig = LengthConfig()
    """Response lengths."""
    episode: SimulatedEpisodeConfig = SimulatedEpisodeConfig()
    """Episodes."""
    reward: SimulatedRewardConfig = SimulatedRewardConfig()
    """Rewards."""
    efficiency: EfficiencyConfig = EfficiencyConfig()
    """Assumed shares of peak rates, and overheads."""
    cost_model: str = ""
    """YAML file of `profile-engine`, which replaces the roofline model of the engine."""
    engine_memory_share: float = Field(0.85, gt=0, le=1)
    """Share of the HBM for weights and KV cache of an engine (assumed)."""
    trainer_memory_share: float = Field(0.8, gt=0, le=1)
    """Share of a trainer GPU's memory that the estimated peak may use (assumed): the limit of
    `plan`, and of trainer.recompute if that is not set."""
    kv_capacity_tokens: int | None = Field(None, ge=1)
    """Capacity of the KV cache of one engine, in tokens; none = from the memory, or from the cost
    model."""
    admission_reserve_tokens: int = Field(400, ge=0)
    """Number of free KV tokens per running request that an engine requires to admit another one
    (assumed: SGLang's new-token ratio near its floor of 0.1, times its limit of 4,096)."""
    retract_steps: int = Field(20, ge=1)
    """Number of decode steps for which a preemption frees memory (SGLang's value)."""
    training_flops_per_parameter: float = Field(6.0, gt=0)
    """FLOPs per token and parameter: 2 forward and 4 backward."""
    extra_forward_passes: float = Field(0.0, ge=0)
    """Number of passes without gradient per token: pi_old, reference, RAPID's."""
    padding: Literal["packed", "batch"] = "packed"
    """Computed tokens. `packed`: only real tokens, as in this project's trainer. `batch`: every
    sequence of a generated batch at the length of its longest one, as in TRL, whose microbatches
    are slices of one padded tensor."""
    trainer_seconds_per_token: float | None = Field(None, gt=0)
    """Measured time of the trainer per token, in seconds; replaces its roofline model."""
    trainer_seconds_per_update: float | None = Field(None, ge=0)
    """Measured fixed time of an optimizer step, in seconds; replaces the assumed one."""
    weight_update_seconds: float | None = Field(None, ge=0)
    """Measured pause of one weight update, in seconds; replaces the estimate from bytes and
    links."""
    steps: int = Field(30, ge=1)
    """Number of batches to simulate."""
    warmup_steps: int = Field(5, ge=0)
    """Number of first batches that results do not include."""
    chunk_tokens: int = Field(2048, ge=1)
    """Number of decode steps between two reports of running requests' tokens."""
    load_report_seconds: float = Field(5.0, gt=0)
    """Virtual time between load reports, in seconds."""

    def check(self) -> None:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"simulate.warmup_steps {self.warmup_steps} must be below simulate.steps "
                f"{self.steps}"
            )


class SimulationConfig(RunConfig):
    """A simulation: `megatron-async simulate --config FILE`, or `plan`."""

    simulate: SimulateConfig = SimulateConfig()
    """The simulated cluster and its assumptions."""

    @model_validator(mode="before")
    @classmethod
    def _placement(cls, values: Any) -> Any:
        """Simulate the placement of the run unless `simulate` sets another one."""
        engines, own = values.get("engines"), values.get("simulate", {})
        shared = isinstance(engines, dict) and engines.get("placement") == "colocated"
        if not shared or not isinstance(own, dict):
            return values
        return {**values, "simulate": {"placement": "colocated", "offload": True, **own}}

    @property
    def opens_episodes(self) -> bool:
        return self.has_episodes or self.simulate.episode.turns is not None


def simulation_of(config: RunConfig) -> SimulationConfig:
    """Return the simulation of a run with the default assumptions; return a simulation
    unchanged."""
    if isinstance(config, SimulationConfig):
        return config
    # Not checked again, because a start may have derived values that a file must not contain.
    return SimulationConfig.model_construct(config.model_fields_set, **dict(config))

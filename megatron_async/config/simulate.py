"""Settings of the simulator and the planner: every constant that they assume is a field here.

They are the section `simulate` of a file of its own kind, a simulation (`SimulationConfig`), which
also holds a run's settings or names the run's file as its `base:`. A run's file cannot have them.

What a field's description calls "assumed" comes from no data sheet; `megatron-async simulate`
prints all of them. Public figures (peak rates, memory, links, model shapes) are in
`megatron_async/simulate/hardware.py` and `models/shape.py` and are chosen by name.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_async.config.base import Settings
from megatron_async.config.run import RunConfig

GpuName = Literal["A100", "H100", "H800", "H200", "B200", "L40S", "A6000"]


class GpuConfig(Settings):
    """The accelerator; a figure left out is the data sheet's."""

    name: GpuName = "H100"
    """Row of the data-sheet table."""
    bf16_tflops: float | None = Field(None, gt=0)
    """Dense bfloat16 peak, TFLOP/s."""
    memory_gb: float | None = Field(None, gt=0)
    """HBM, 1e9 bytes."""
    memory_tb_per_s: float | None = Field(None, gt=0)
    """HBM bandwidth, 1e12 bytes/s."""
    nvlink_gb_per_s: float | None = Field(None, gt=0)
    """To another GPU of the node, one direction, 1e9 bytes/s."""
    network_gb_per_s: float | None = Field(None, gt=0)
    """To another node, per GPU, one direction, 1e9 bytes/s."""
    pcie_gb_per_s: float | None = Field(None, gt=0)
    """To host memory, one direction, 1e9 bytes/s."""


class EfficiencyConfig(Settings):
    """Share of a peak that is reached, and what each step costs on top. All assumed."""

    memory_bandwidth: float = Field(0.8, gt=0, le=1)
    """Of HBM, in decode."""
    decode_flops: float = Field(0.6, gt=0, le=1)
    """Of the peak, in decode's GEMMs."""
    prefill_flops: float = Field(0.5, gt=0, le=1)
    """Of the peak, in prefill."""
    training_flops: float = Field(0.35, gt=0, le=1)
    """Of the peak, forward and backward of packed sequences."""
    links: float = Field(0.7, gt=0, le=1)
    """Of NVLink, network and PCIe."""
    weight_update: float = Field(0.43, gt=0, le=1)
    """Of the network, in a whole weight update (measured with gloo between two CPU cores:
    benchmarks/results/weights.md)."""
    collective_latency_seconds: float = Field(10e-6, ge=0)
    """Fixed cost of one all-reduce inside a node."""
    decode_overhead_seconds: float = Field(0.003, ge=0)
    """Launch, sampling and batch bookkeeping of one decode step."""
    update_overhead_seconds: float = Field(0.3, ge=0)
    """Optimizer step, gradient norm, logging: per optimizer step."""
    batch_overhead_seconds: float = Field(2.0, ge=0)
    """Packing, advantages and hand-over: per batch."""
    weight_update_overhead_seconds: float = Field(1.0, ge=0)
    """Pause, checksums and resume: per weight update, beyond the bytes."""


class LengthConfig(Settings):
    """Response lengths in tokens, before the cut at `sampling.max_new_tokens`."""

    distribution: Literal["lognormal", "weibull", "uniform", "constant", "file"] = "lognormal"
    """`file`: the empirical distribution of recorded lengths; `megatron-async fit-lengths` fits the
    first two to them."""
    median: float | None = Field(None, gt=0)
    """Of the log-normal; the constant's value; none = a quarter of sampling.max_new_tokens
    (assumed)."""
    sigma: float = Field(0.9, gt=0)
    """Standard deviation of the log length."""
    scale: float | None = Field(None, gt=0)
    """Weibull's scale (lambda), none = a third of sampling.max_new_tokens (assumed); uniform: the
    largest length, none = sampling.max_new_tokens."""
    shape: float = Field(1.0, gt=0)
    """Weibull's shape (k); below 1 = heavy tail."""
    path: str = ""
    """One length per line, a JSON list, or JSONL (see docs)."""
    prompt_correlation: float = Field(0.5, ge=0, lt=1)
    """Correlation of (normal scores of) lengths within a prompt."""
    prompt_tokens: int = Field(200, ge=1)
    """Prompt length."""

    def check(self) -> None:
        if self.distribution == "file" and not self.path:
            raise ValueError("distribution: file needs simulate.lengths.path, got nothing")


class SimulatedEpisodeConfig(Settings):
    """Episodes of many turns; `lengths` are then those of one answer."""

    turns: float | None = Field(None, ge=1)
    """Turns of an episode on average; none = no environment."""
    spread: Literal["geometric", "constant"] = "geometric"
    """Of the number of turns."""
    max_turns: int = Field(32, ge=1)
    """Turns after which an episode ends."""
    tool_seconds: float = Field(1.0, ge=0)
    """The environment's time for a reply, the first one too; the median."""
    tool_sigma: float = Field(0.0, ge=0)
    """Standard deviation of its log."""
    observation_tokens: int = Field(100, ge=1)
    """Tokens that an environment sends in a turn."""


class SimulatedRewardConfig(Settings):
    """Rewards matter to the simulation only through `schedule.dynamic_sampling`."""

    success_alpha: float = Field(0.5, gt=0)
    """A prompt's rate of success is Beta(alpha, beta) distributed."""
    success_beta: float = Field(0.5, gt=0)
    """See success_alpha."""
    scorer_seconds: float = Field(0.05, ge=0)
    """One score, by one of at most task.scorer_workers scorers."""


class SimulateConfig(Settings):
    """Settings of `megatron-async simulate` and `plan` beside the run's own."""

    model: str = ""
    """Name of a public shape (see docs/simulator.md); empty = model.path's."""
    gpu: GpuConfig = GpuConfig()
    """Accelerator."""
    gpus: int | None = Field(None, ge=1)
    """`plan`: GPUs in all; none = those of the file's own layout, else one node."""
    gpus_per_node: int = Field(8, ge=1)
    """GPUs that NVLink joins."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Trainers and engines on their own GPUs, or all GPUs for each in turn. Unset where
    engines.placement is colocated: colocated, with `offload`."""
    offload: bool = False
    """Colocated: the trainer's state leaves its GPUs while engines generate. Otherwise it stays,
    and the KV cache gets the remaining memory."""
    lengths: LengthConfig = LengthConfig()
    """Response lengths."""
    episode: SimulatedEpisodeConfig = SimulatedEpisodeConfig()
    """Environments."""
    reward: SimulatedRewardConfig = SimulatedRewardConfig()
    """Rewards."""
    efficiency: EfficiencyConfig = EfficiencyConfig()
    """Assumed shares and overheads."""
    cost_model: str = ""
    """YAML written by `profile-engine`; replaces the roofline of the engine."""
    engine_memory_share: float = Field(0.85, gt=0, le=1)
    """Of HBM for weights and KV cache (assumed)."""
    trainer_memory_share: float = Field(0.8, gt=0, le=1)
    """Of a trainer GPU's memory, for the estimated peak: the limit of `plan`, and of
    trainer.recompute where that is not set (assumed)."""
    kv_capacity_tokens: int | None = Field(None, ge=1)
    """Of one engine; none = from memory, or from the cost model."""
    admission_reserve_tokens: int = Field(400, ge=0)
    """Free KV that an engine asks for, per running request, before it admits one more (assumed;
    SGLang's new-token ratio near its floor of 0.1 times its clip of 4,096)."""
    retract_steps: int = Field(20, ge=1)
    """Decode steps that a preemption makes room for (SGLang's value)."""
    training_flops_per_parameter: float = Field(6.0, gt=0)
    """Per token: 2 forward + 4 backward."""
    extra_forward_passes: float = Field(0.0, ge=0)
    """Passes without gradient per token: pi_old, reference, RAPID's."""
    padding: Literal["packed", "batch"] = "packed"
    """`packed`: only real tokens are computed, as this project's trainer does. `batch`: every
    sequence of a generated batch at the length of its longest, as in TRL, whose microbatches are
    slices of one padded tensor."""
    trainer_seconds_per_token: float | None = Field(None, gt=0)
    """Measured; replaces the trainer's roofline."""
    trainer_seconds_per_update: float | None = Field(None, ge=0)
    """Measured; replaces the fixed cost of an optimizer step."""
    weight_update_seconds: float | None = Field(None, ge=0)
    """Measured pause of one weight update; replaces bytes over links."""
    steps: int = Field(30, ge=1)
    """Batches that are simulated."""
    warmup_steps: int = Field(5, ge=0)
    """First batches left out of the figures."""
    chunk_tokens: int = Field(2048, ge=1)
    """Decode steps between two reports of running requests' tokens."""
    load_report_seconds: float = Field(5.0, gt=0)
    """Virtual time between load reports."""

    def check(self) -> None:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"simulate.warmup_steps {self.warmup_steps} must be below simulate.steps "
                f"{self.steps}"
            )


class SimulationConfig(RunConfig):
    """A simulation: `megatron-async simulate --config FILE`, or `plan`."""

    simulate: SimulateConfig = SimulateConfig()
    """The simulated cluster and the assumptions about it."""

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
    """Return the simulation of a run with the default assumptions; a simulation as it is."""
    if isinstance(config, SimulationConfig):
        return config
    # Not checked again: a start may have derived settings which its file could not have.
    return SimulationConfig.model_construct(config.model_fields_set, **dict(config))

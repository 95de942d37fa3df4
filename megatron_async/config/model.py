"""Settings of the model, its parallel layout, the optimizer and the trainer."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_async.config.base import Settings

Recompute = Literal["none", "feed_forward", "all"] | Annotated[int, Field(ge=1)]


class ModelConfig(Settings):
    """Source of the weights, their precision in training, and implementations of layers."""

    path: str = ""
    """Hugging Face directory with config.json, safetensors and tokenizer."""
    checkpoint: str = ""
    """Checkpoint (of a run, or made by `convert`) whose weights replace those of `path`, which
    still provides config and tokenizer; empty = the weights of `path`."""
    family: str = ""
    """Import path of your own model family (examples/own_family); empty = the built-in family with
    the model_type of config.json."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights in training. `auto`: bfloat16 on GPUs (gradients are summed in fp32),
    float32 on CPU."""
    attention_backend: Literal["auto", "sdpa", "transformer_engine"] = "auto"
    """Implementation of attention. `auto`: Transformer Engine if it is installed and a GPU is
    present."""
    experts: Literal["auto", "sequential", "grouped", "transformer_engine"] = "auto"
    """Implementation of experts. `grouped`: all experts of a rank in one product, torch's
    grouped_mm. `sequential`: one expert after the other. `transformer_engine`: Transformer Engine's
    grouped product. `auto`: grouped if grouped_mm supports the model's precision and widths,
    otherwise transformer_engine if attention uses it, otherwise sequential."""


class ParallelConfig(Settings):
    """Parallel layout of the trainer; the data parallel size follows from the number of ranks."""

    ranks: int = Field(1, ge=1)
    """Number of trainer processes on all nodes together."""
    nodes: int = Field(1, ge=1)
    """Number of trainer nodes."""
    tensor: int = Field(1, ge=1)
    """Tensor parallel size (TP)."""
    pipeline: int = Field(1, ge=1)
    """Pipeline parallel size (PP)."""
    context: int = Field(1, ge=1)
    """Context parallel size (CP)."""
    expert: int = Field(1, ge=1)
    """Expert parallel size (EP)."""
    sequence: bool = False
    """Whether sequence parallelism is used (needs tensor > 1)."""

    def check(self) -> None:
        model_size = self.tensor * self.pipeline * self.context
        if self.ranks % model_size:
            raise ValueError(
                f"parallel.ranks {self.ranks} is not divisible by tensor {self.tensor} x pipeline "
                f"{self.pipeline} x context {self.context} = {model_size}"
            )
        if self.ranks % self.nodes:
            raise ValueError(
                f"parallel.ranks {self.ranks} is not divisible by parallel.nodes {self.nodes}"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError("parallel.sequence is true, which requires parallel.tensor > 1, got 1")

    @property
    def data(self) -> int:
        """Data parallel size (DP)."""
        return self.ranks // (self.tensor * self.pipeline * self.context)


class OptimizerConfig(Settings):
    """Adam or Muon, with a warm-up and a constant or cosine learning rate."""

    name: Literal["adam", "muon"] = "adam"
    """Optimizer. `muon`: Muon for matrices of the layers, Adam for everything else, with one
    learning rate."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the cosine."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after the warm-up: constant, or a cosine from `lr` down to
    `min_lr`."""
    warmup_steps: int = Field(0, ge=0)
    """Number of optimizer steps of the linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices and embeddings; norms and biases are not decayed."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's momentum."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 = no limit."""
    distributed: bool = True
    """Whether Adam's state is sharded over data-parallel ranks; Muon's state is not."""

    @property
    def sharded(self) -> bool:
        """Whether each data-parallel rank has only a part of the optimizer state."""
        return self.distributed and self.name == "adam"

    def check(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and less than 1, got {list(self.betas)}")
        if self.schedule == "cosine" and self.min_lr > self.lr:
            raise ValueError(f"min_lr is {self.min_lr:g}; it must not be above lr {self.lr:g}")


class TrainerConfig(Settings):
    """Microbatches, and the limits at which a run stops."""

    microbatch_tokens: int = Field(16384, ge=1)
    """Largest number of tokens of a microbatch; a longer sequence is a microbatch by itself."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Number of response tokens whose logits are in memory at once: log-probs are computed in
    chunks of this size."""
    recompute: Recompute = "none"
    """Activations that the backward pass computes again instead of keeping them. `feed_forward`:
    the MLP or experts of each layer; a number: so many layers of each pipeline stage; `all`: all
    layers. If it is not set and engines run on GPUs, it is the value with the least recomputation
    with which the estimated peak memory fits into a GPU, or `all` if none fits."""
    compare_replicas_every_steps: int = Field(10, ge=0)
    """Number of steps between comparisons of the weights of which several ranks have copies.
    Weights are also compared after the first step of each start. Ranks compare one hash per tensor,
    and a difference stops the run. 0 = never."""
    wait_for_batch_seconds: float = Field(1800.0, gt=0)
    """Longest wait for a batch before the run stops with an error, in seconds."""
    collective_timeout_seconds: float = Field(600.0, gt=0)
    """Longest wait inside one collective operation, in seconds. A smaller value is raised to
    weights.timeout_seconds plus about four minutes: during a weight update, an engine may delay one
    rank for this long, including connecting and cleaning up, while the other ranks wait in a
    collective operation."""
    max_restarts: int = Field(0, ge=0)
    """Number of restarts of all ranks by torchrun, each from the last checkpoint."""

"""Settings of the model, its parallel layout, the optimizer and the trainer."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_async.config.base import Settings

Recompute = Literal["none", "feed_forward", "all"] | Annotated[int, Field(ge=1)]


class ModelConfig(Settings):
    """Source of the weights, and the precision in which they are trained."""

    path: str = ""
    """Hugging Face directory: config.json, safetensors, tokenizer"""
    checkpoint: str = ""
    """Checkpoint (of a run, or made by `convert`) whose weights replace those of `path`, which
    still gives config and tokenizer; empty = the weights of `path`."""
    family: str = ""
    """Import path of a model family of your own (examples/own_family); empty = the one of ours with
    the model_type of config.json."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on GPU (fp32 main grads), float32 on CPU."""
    attention_backend: Literal["auto", "sdpa", "transformer_engine"] = "auto"
    """`auto`: Transformer Engine when installed and a GPU is there."""
    experts: Literal["auto", "sequential", "grouped", "transformer_engine"] = "auto"
    """All experts of a rank in one product (`grouped`: torch's grouped_mm), or one by one. `auto`:
    grouped where it takes the model's precision and widths."""


class ParallelConfig(Settings):
    """Ranks of the trainer; data parallel size follows from the world size."""

    ranks: int = Field(1, ge=1)
    """Trainer processes on all nodes together."""
    nodes: int = Field(1, ge=1)
    """Trainer nodes."""
    tensor: int = Field(1, ge=1)
    """TP size."""
    pipeline: int = Field(1, ge=1)
    """PP size."""
    context: int = Field(1, ge=1)
    """CP size."""
    expert: int = Field(1, ge=1)
    """EP size."""
    sequence: bool = False
    """Sequence parallelism (needs tensor > 1)."""

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
            raise ValueError("parallel.sequence true needs parallel.tensor > 1, got 1")

    @property
    def data(self) -> int:
        """DP size."""
        return self.ranks // (self.tensor * self.pipeline * self.context)


class OptimizerConfig(Settings):
    """Adam or Muon with a warm-up and a constant or cosine schedule."""

    name: Literal["adam", "muon"] = "adam"
    """muon: matrices of the layers by Muon, everything else by Adam, with one learning rate."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the cosine."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, in optimizer steps."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's moments."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices and embeddings; norms and biases have none."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum of the matrices."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 = no limit."""
    distributed: bool = True
    """Shard Adam's state over data-parallel ranks (when there are several); Muon's is whole."""

    @property
    def sharded(self) -> bool:
        """Return whether data-parallel ranks each hold a part of the state."""
        return self.distributed and self.name == "adam"

    def check(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and less than 1, got {list(self.betas)}")
        if self.schedule == "cosine" and self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}: the rate would rise")


class TrainerConfig(Settings):
    """Settings of microbatches, and of the limits at which a run gives up."""

    microbatch_tokens: int = Field(16384, ge=1)
    """Token budget of a microbatch; a longer sequence stands alone."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Response tokens whose logits exist at once in the chunked head."""
    recompute: Recompute = "none"
    """Activations that the backward pass computes again instead of keeping them: `feed_forward`,
    the MLP or experts of each layer; a number, so many layers of each pipeline stage; `all` layers.
    Unless set, the least with which the estimated peak fits into a GPU."""
    compare_replicas_every_steps: int = Field(10, ge=0)
    """Compare the copies of weights that ranks must hold equal (one hash a tensor), after the first
    step and after every such number of steps; a difference stops the run. 0 = never."""
    wait_for_batch_seconds: float = Field(1800.0, gt=0)
    """Longest wait for a batch before the run stops with an error."""
    collective_timeout_seconds: float = Field(600.0, gt=0)
    """Longest wait inside one collective operation; never less than weights.timeout_seconds and
    some four minutes to connect and to clean up, for which an engine may hold a rank up."""
    max_restarts: int = Field(0, ge=0)
    """torchrun restarts of all ranks, from the last checkpoint."""

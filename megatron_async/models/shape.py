"""Computes parameter counts, bytes and FLOPs of a language model from the sizes in its config.json.

The counts are for decoders like Llama and Qwen, with grouped-query attention and a gated MLP or
experts. Biases and norm weights are not counted; they are less than 0.01 % of the parameters.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from megatron_async.config import RunConfig
from megatron_async.config.simulate import SimulationConfig
from megatron_async.errors import UserError
from megatron_async.models.architecture import ConfigReader, read_config_json

BF16 = 2
"""Number of bytes of a weight and of an element of the KV cache, both in bfloat16."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, and the parameter counts and costs that follow from
    them.

    Attributes:
        intermediate: Width of the MLP, or of one expert.
        experts: Number of experts of a layer; 0 for a dense model.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of the attention projections of all layers."""
        width = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * self.hidden * width

    @property
    def mlp_parameters(self) -> int:
        """Number of parameters of the dense MLP, or of one expert, in all layers."""
        return self.layers * 3 * self.hidden * self.intermediate

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the output projection."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters of the model."""
        router = self.layers * self.hidden * self.experts
        embeddings = self.head_parameters * (1 if self.tied else 2)
        mlp = self.mlp_parameters * max(1, self.experts)
        return self.attention_parameters + mlp + router + embeddings

    @cached_property
    def active_parameters(self) -> int:
        """Number of parameters of matrices by which a token is multiplied: attention, the MLP or
        the experts that it uses, and the output projection. The router and the input embedding are
        not counted."""
        mlp = self.mlp_parameters * (self.experts_per_token if self.experts else 1)
        return self.attention_parameters + mlp + self.head_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16

    @cached_property
    def attention_flops_per_token_pair(self) -> int:
        """FLOPs that attention needs for one query token and one key token, for the score and the
        weighted sum, over all layers and heads."""
        return 4 * self.layers * self.heads * self.head_dim

    def weight_bytes_read(self, batch: float) -> float:
        """Return the bytes of weights that one decode step of `batch` tokens reads.

        An expert's weights are read if at least one token uses the expert. It is assumed that each
        token is routed uniformly and independently.
        """
        if not self.experts:
            return BF16 * self.active_parameters
        unused = (1 - self.experts_per_token / self.experts) ** batch
        experts = self.mlp_parameters * self.experts * (1 - unused)
        return BF16 * (self.attention_parameters + self.head_parameters + experts)


SHAPES: Final = MappingProxyType(
    {
        "qwen2.5-0.5b": ModelShape(896, 24, 14, 2, 64, 4864, 151936, True),
        "qwen2.5-1.5b": ModelShape(1536, 28, 12, 2, 128, 8960, 151936, True),
        "qwen2.5-7b": ModelShape(3584, 28, 28, 4, 128, 18944, 152064, False),
        "qwen2.5-32b": ModelShape(5120, 64, 40, 8, 128, 27648, 152064, False),
        "qwen3-8b": ModelShape(4096, 36, 32, 8, 128, 12288, 151936, False),
        "qwen3-30b-a3b": ModelShape(2048, 48, 32, 4, 128, 768, 151936, False, 128, 8),
        "qwen2.5-72b": ModelShape(8192, 80, 64, 8, 128, 29568, 152064, False),
        "llama-3-8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128256, False),
        "llama-3-70b": ModelShape(8192, 80, 64, 8, 128, 28672, 128256, False),
        "llama-3.3-70b": ModelShape(8192, 80, 64, 8, 128, 28672, 128256, False),
        "gemma-3-1b": ModelShape(1152, 26, 4, 1, 256, 6912, 262144, True),
    }
)


def shape_of(config: RunConfig) -> ModelShape:
    """Return the sizes of a run's model.

    If a simulation names a public model (`simulate.model`), its sizes are in the table `SHAPES`.
    Otherwise they come from the config.json in `model.path`. If that directory does not exist on
    this machine, they come from the first model in `SHAPES` whose name the directory's name
    contains.

    Raises:
        UserError: If the sizes cannot be found.
    """
    name = config.simulate.model if isinstance(config, SimulationConfig) else ""
    if name:
        if name not in SHAPES:
            raise UserError(f"simulate.model is {name!r}; it must be one of {', '.join(SHAPES)}")
        return SHAPES[name]
    folder = Path(config.model.path)
    file = folder / "config.json"
    if config.model.path and file.is_file():
        return shape_from_config(read_config_json(config.model.path), file)
    public = [shape for known, shape in SHAPES.items() if known in folder.name.lower()]
    if public and not folder.exists():
        return public[0]
    raise UserError(
        f"the sizes of the model are not known: model.path {config.model.path!r} has no "
        "config.json (which is enough, without weights), and its name contains none of "
        f"{', '.join(SHAPES)}; a simulation may set simulate.model to one of them"
    )


def shape_from_config(data: dict[str, Any], path: Path) -> ModelShape:
    """Return the sizes that a parsed config.json states, even for families the trainer does not
    support.

    Args:
        data: The parsed config.json.
        path: The file, for error messages.

    Raises:
        UserError: If a size is missing or invalid.
    """
    outer = ConfigReader(data, "the simulator", f"model.path: {path}")
    inner = outer.mapping("text_config", data.get("text_config", data))
    config = ConfigReader(inner, outer.family, outer.where)
    counts = [key for key in ("num_experts", "num_local_experts") if inner.get(key)]
    experts = config.integer(counts[0]) if counts else 0
    width = "moe_intermediate_size" if experts else "intermediate_size"
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return ModelShape(
        hidden=hidden,
        layers=config.layers(),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // heads),
        intermediate=config.integer(width if inner.get(width) else "intermediate_size"),
        vocab=config.integer("vocab_size"),
        tied=config.flag("tie_word_embeddings"),
        experts=experts,
        experts_per_token=config.integer("num_experts_per_tok", largest=experts) if experts else 0,
    )

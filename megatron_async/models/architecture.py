"""`Architecture`: what a Hugging Face config.json says about a decoder, as plain checked numbers.

Invariants
- Nothing is guessed: a setting of the config that the trainer does not implement (a rope type, an
  activation, a bias) is refused with one sentence that names it, never ignored.
- Both spellings of rotary settings are read: `rope_parameters` (transformers 5) and `rope_theta`
  with `rope_scaling` (transformers 4).
- No import of transformers: reading a config costs milliseconds and runs no model code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_async.errors import UserError

RopeKind = Literal["default", "linear", "llama3"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base `theta` and the scaling of its frequencies.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1) divides those whose
    wavelength passes `original_max_positions / low_freq_factor`, keeps those below
    `original_max_positions / high_freq_factor`, and interpolates in between.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts feed-forward: `num` experts of width `ffn_size`, `top_k` a token.

    `normalize_top_k`: the weights of the chosen experts sum to 1.
    """

    num: int
    top_k: int
    ffn_size: int
    normalize_top_k: bool


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model as its family describes it."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_head: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    experts: Experts | None = None
    # Gemma 3: sliding-window layers with a rope of their own, norms after attention and MLP,
    # norm weights stored as offsets from 1, embeddings scaled by sqrt(hidden size).
    local_window: int | None = None
    local_layers: tuple[bool, ...] = ()
    local_rope: Rope | None = None
    post_norms: bool = False
    zero_centered_norm: bool = False
    scale_embeddings: bool = False
    attention_scale: float | None = None
    dtype: str = "float32"
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Rows of the embedding over all tensor ranks: the next multiple of `tensor_size`."""
        return -(-self.vocab_size // tensor_size) * tensor_size


class ConfigReader:
    """Typed access to config.json; every refusal names the file's key and value."""

    def __init__(self, raw: Mapping[str, Any], family: str) -> None:
        self.raw = raw
        self.family = family

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"config.json: {key} is {value!r}; it must be a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"config.json: {key} is {value!r}; it must be a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        return default if value is None else bool(value)

    def refuse(self, key: str, allowed: Sequence[Any] = (None, False)) -> None:
        """Raises UserError when `key` is set to anything that is not `allowed`."""
        value = self.raw.get(key)
        if value not in allowed:
            raise UserError(
                f"config.json: {key} is {value!r}, which is not supported for {self.family}"
            )

    def head_dim(self) -> int:
        heads = self.integer("num_attention_heads")
        if self.raw.get("head_dim") is not None:
            return self.integer("head_dim")
        return self.integer("hidden_size") // heads

    def rope(self) -> Rope:
        """`rope_parameters`, or `rope_theta` and `rope_scaling`."""
        settings = self.raw.get("rope_parameters")
        if settings is None:
            settings = {**(self.raw.get("rope_scaling") or {})}
            settings["rope_theta"] = self.raw.get("rope_theta", 10000.0)
        return self.rope_from(settings)

    def rope_from(self, settings: Mapping[str, Any]) -> Rope:
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise UserError(
                f"config.json: rope type {kind!r} is not supported; default, linear and llama3 are"
            )
        if settings.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(
                "config.json: partial_rotary_factor is "
                f"{settings['partial_rotary_factor']!r}; only 1.0 is supported"
            )
        theta = float(settings.get("rope_theta", 10000.0))
        if kind == "default":
            return Rope(theta=theta)
        if kind == "linear":
            return Rope(theta=theta, kind="linear", factor=float(settings["factor"]))
        return Rope(
            theta=theta,
            kind="llama3",
            factor=float(settings["factor"]),
            low_freq_factor=float(settings["low_freq_factor"]),
            high_freq_factor=float(settings["high_freq_factor"]),
            original_max_positions=int(settings["original_max_position_embeddings"]),
        )

    def dense(self, **extra: Any) -> Architecture:
        """The fields that all supported decoders share, plus `extra`."""
        heads = self.integer("num_attention_heads")
        fields: dict[str, Any] = {
            "family": self.family,
            "num_layers": self.integer("num_hidden_layers"),
            "hidden_size": self.integer("hidden_size"),
            "ffn_size": self.integer("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": self.head_dim(),
            "vocab_size": self.integer("vocab_size"),
            "max_positions": self.integer("max_position_embeddings", 2048),
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "tied_head": self.flag("tie_word_embeddings"),
            "dtype": str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"),
            "raw": self.raw,
        }
        if "rope" not in extra:
            fields["rope"] = self.rope()
        fields.update(extra)
        architecture = Architecture(**fields)
        if architecture.num_heads % architecture.num_kv_heads:
            raise UserError(
                f"config.json: num_attention_heads {architecture.num_heads} is not divisible by "
                f"num_key_value_heads {architecture.num_kv_heads}"
            )
        return architecture


def read_config_json(model_dir: Path | str) -> dict[str, Any]:
    """The mapping in `model_dir/config.json`. Raises UserError naming what is wrong."""
    path = Path(model_dir) / "config.json"
    if not str(model_dir):
        raise UserError("model.path is empty; it must name a Hugging Face model directory")
    if not Path(model_dir).is_dir():
        raise UserError(f"model.path {model_dir} is not a directory")
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"model.path {model_dir} has no config.json") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw

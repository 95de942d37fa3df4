"""Reads a Hugging Face config.json into an `Architecture`, which describes a decoder-only model by
plain, checked numbers.

Also computes `served_context`, the context length with which SGLang serves a model: the largest
number of tokens of prompt and response together.

Invariants
- Nothing is guessed: if config.json has a setting that the trainer does not implement (a rope type,
  an activation, a bias), an error message names the setting; the setting is never ignored.
- Both spellings of rotary settings are read: `rope_parameters` (transformers 5) and `rope_theta`
  with `rope_scaling` (transformers 4). If a file has both, those are used that transformers 5 uses,
  and an error is raised if the others contradict them.
- transformers is not imported: reading a config takes milliseconds and runs no model code.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from megatron_async.config.files import read_json_object
from megatron_async.errors import UserError, short_repr

MAX_SIZE: Final = (1 << 31) - 1
"""Largest allowed dimension or count in a config.json, which is the largest that a tensor can
have."""
MAX_LAYERS: Final = 100_000
_ORIGINAL: Final = "original_max_position_embeddings"
DTYPES: Final = ("float32", "bfloat16", "float16")

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base `theta` and how its frequencies are scaled for long
    contexts.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1) divides the frequencies whose
    wavelength exceeds `original_max_positions / low_freq_factor`, does not change those whose
    wavelength is below `original_max_positions / high_freq_factor`, and interpolates between the
    two. `yarn` does not change frequencies that rotate more than `beta_fast` times in the original
    context, divides those that rotate less than `beta_slow` times, and interpolates between the
    two.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def score_scale(self) -> float:
        """Factor by which attention scores are multiplied. For YaRN it is 1/t of Peng et al. (arXiv
        2309.00071, section 3.4), otherwise 1."""
        return (0.1 * math.log(self.factor) + 1) ** 2 if self.kind == "yarn" else 1.0


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts feed-forward: `num` experts of width `ffn_size`, of which a token uses
    `top_k`.

    Attributes:
        normalize_top_k: Whether the weights of a token's experts are scaled so that they sum to 1.
    """

    num: int
    top_k: int
    ffn_size: int
    normalize_top_k: bool


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model: its sizes and the features by which model families differ."""

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
    # The fields from here to `scale_embeddings` are for Gemma 3: sliding-window layers with a
    # separate rope, norms after attention and MLP, norm weights stored as offsets from 1, and
    # embeddings scaled by sqrt(hidden size).
    local_window: int | None = None
    local_layers: tuple[bool, ...] = ()
    local_rope: Rope | None = None
    post_norms: bool = False
    zero_centered_norm: bool = False
    scale_embeddings: bool = False
    attention_scale: float | None = None
    dtype: str = "float32"

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Return the number of rows of the embedding over `tensor_size` tensor-parallel ranks: the
        vocabulary, padded to a multiple of the number of ranks."""
        return -(-self.vocab_size // tensor_size) * tensor_size


class ConfigReader:
    """Reads values of a config.json and checks their types. Errors name the file, the key and the
    value.

    Attributes:
        raw: The content of the file.
        family: Name of the model family, for error messages.
        where: Name of the file, for error messages.
    """

    def __init__(self, raw: Mapping[str, Any], family: str, where: str = "config.json") -> None:
        self.raw = raw
        self.family = family
        self.where = where

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, largest: int = MAX_SIZE) -> int:
        """Return the whole number of `key`, or `default` if the key is missing or null.

        Raises:
            UserError: If the value is not a whole number from 1 to `largest`.
        """
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            raise self.error(key, value, f"a whole number from 1 to {largest}")
        return value

    def number(self, key: str, default: float) -> float:
        """Return the positive number of `key`, or `default` if the key is missing or null.

        Raises:
            UserError: If the value is not a positive finite number.
        """
        return self._positive(key, self._get(key, default))

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the bool of `key`, or `default` if the key is missing or null.

        Raises:
            UserError: If the value is not a bool.
        """
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def mapping(self, key: str, value: Any) -> Mapping[str, Any]:
        """Check that `value`, the value of `key` in the file, is a mapping; return it.

        Raises:
            UserError: If the value is not a mapping.
        """
        if not isinstance(value, Mapping):
            raise self.error(key, value, "a mapping")
        return value

    def refuse(self, key: str, allowed: Sequence[Any] = (None, False)) -> None:
        """Raise UserError if `key` is set to a value that is not among `allowed`."""
        value = self.raw.get(key)
        if value not in allowed:
            raise UserError(
                f"{self.where}: {key} is {short_repr(value)}, which is not supported for "
                f"{self.family}"
            )

    def error(self, key: str, value: Any, required: str) -> UserError:
        """Return a UserError with the message that `key` is `value` and must be what the text
        `required` describes."""
        return UserError(f"{self.where}: {key} is {short_repr(value)}; it must be {required}")

    def _positive(self, key: str, value: Any) -> float:
        """Check that `value` is a positive finite number; return it as a float.

        Raises:
            UserError: If it is not.
        """
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if 0 < number < math.inf:
                return number
        raise self.error(key, value, "a positive number")

    def head_dim(self) -> int:
        """Return the size of an attention head: the value of `head_dim` or, if it is not set, the
        hidden size divided by the number of heads.

        Raises:
            UserError: If the size is odd, because rope rotates pairs of elements, or if the
                division has a remainder.
        """
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if self.raw.get("head_dim") is None and hidden % heads:
            raise self.error("hidden_size", hidden, f"divisible by num_attention_heads {heads}")
        size = self.integer("head_dim", hidden // heads)
        if size % 2:
            raise self.error("head_dim", size, "even")
        return size

    def rope_settings(self) -> tuple[str, Mapping[str, Any]]:
        """Return the key of the rotary settings that transformers reads, and their value."""
        key = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        return key, self.mapping(key, self.raw.get(key) or {})

    def rope(self, default_theta: float = 1e4) -> Rope:
        """Read the rope (rotary embedding) from `rope_scaling` or, if that is not set, from
        `rope_parameters`.

        The base is the `rope_theta` in these settings or, if they have none, the `rope_theta` of
        config.json itself.

        If config.json has both `rope_scaling` and `rope_parameters`, transformers and SGLang ignore
        `rope_parameters`. It is then accepted in two cases: it describes the same rope as
        `rope_scaling`, or it describes a rope with the same base and no scaling.

        Args:
            default_theta: The base if config.json has none.

        Raises:
            UserError: If a setting is invalid or not supported, or if `rope_parameters` contradicts
                `rope_scaling`.
        """
        key, settings = self.rope_settings()
        ignored = self.mapping("rope_parameters", self.raw.get("rope_parameters") or {})
        theta = self.raw.get("rope_theta", default_theta)
        rope = self.rope_from({"rope_theta": theta, **settings}, key)
        other = self.rope_from({"rope_theta": theta, **ignored}, "rope_parameters")
        if ignored and other not in (rope, Rope(rope.theta)):
            raise UserError(
                f"{self.where}: {key} is {short_repr(dict(settings))} with rope_theta "
                f"{rope.theta:g}, and rope_parameters is {short_repr(dict(ignored))}; SGLang and "
                f"transformers read only {key}. Make them agree, or remove one."
            )
        return rope

    def rope_from(self, settings: Mapping[str, Any], key: str) -> Rope:
        """Parse `settings`, the value of `key` in config.json, as a rope (rotary embedding) that
        all layers have.

        Raises:
            UserError: If a setting is invalid or not supported.
        """
        if any(isinstance(value, Mapping) for value in settings.values()):
            raise self.error(key, dict(settings), "one rope for all layers")
        kind = settings.get("rope_type", settings.get("type", "default"))
        if settings.get("type", kind) != kind:
            raise self.error(
                f"{key}.type", settings["type"], f"{short_repr(kind)}, as rope_type is"
            )
        if kind not in get_args(RopeKind):
            raise UserError(
                f"{self.where}: {key} has the rope type {short_repr(kind)}, which is not "
                f"supported; supported are {', '.join(get_args(RopeKind))}"
            )
        if settings.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(
                f"{self.where}: partial_rotary_factor is "
                f"{short_repr(settings['partial_rotary_factor'])}; only 1.0 is supported"
            )

        def positive(name: str) -> float:
            return self._positive(f"{key}.{name}", settings.get(name))

        theta = self._positive("rope_theta", settings["rope_theta"])
        if kind == "default":
            return Rope(theta=theta)
        if kind == "linear":
            return Rope(theta=theta, kind="linear", factor=positive("factor"))
        if kind == "yarn":
            return self._yarn(theta, settings, key)
        self.refuse(_ORIGINAL, (None, settings.get(_ORIGINAL)))
        low, high = positive("low_freq_factor"), positive("high_freq_factor")
        if low >= high:
            raise self.error(f"{key}.high_freq_factor", high, f"above low_freq_factor {low}")
        positions = ConfigReader(settings, self.family, f"{self.where}: {key}")
        return Rope(
            theta=theta,
            kind="llama3",
            factor=positive("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=positions.integer(_ORIGINAL),
        )

    def _yarn(self, theta: float, settings: Mapping[str, Any], key: str) -> Rope:
        """Parse the settings of a YaRN rope with base `theta`.

        Raises:
            UserError: If a setting is invalid, or if it is one that SGLang and transformers
                interpret differently or ignore.
        """
        yarn = ConfigReader(settings, self.family, f"{self.where}: {key}")
        for name in ("attention_factor", "attn_factor", "mscale", "mscale_all_dim"):
            yarn.refuse(name, (None,))
        yarn.refuse("truncate", (None, True))
        self.refuse(_ORIGINAL, (None,))
        factor, fast = yarn.number("factor", 0.0), yarn.number("beta_fast", 32.0)
        slow = yarn.number("beta_slow", 1.0)
        if factor < 1:
            raise self.error(f"{key}.factor", factor, "1 or more")
        if slow >= fast:
            raise self.error(f"{key}.beta_slow", slow, f"below beta_fast {fast:g}")
        if theta <= 1:
            raise self.error("rope_theta", theta, "above 1 with yarn")
        positions = self.integer("max_position_embeddings", 2048)
        return Rope(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_positions=yarn.integer(_ORIGINAL, positions),
            beta_fast=fast,
            beta_slow=slow,
        )

    def experts(self, count_key: str, width_key: str, *, normalize_top_k: bool) -> Experts:
        """Read the mixture of experts of every layer.

        Args:
            count_key: Key of the number of experts.
            width_key: Key of the width of an expert.
            normalize_top_k: Whether the weights of a token's experts sum to 1.

        Raises:
            UserError: If a number is invalid, or if each token uses one expert whose weight is
                always 1, so that the router would get no gradient.
        """
        count = self.integer(count_key)
        top_k = self.integer("num_experts_per_tok", largest=count)
        if top_k == 1 and normalize_top_k:
            # With weights that sum to 1, the weight of a single expert is always 1, so the router
            # would get no gradient.
            raise self.error("num_experts_per_tok", 1, "2 or more if their weights sum to 1")
        return Experts(
            num=count,
            top_k=top_k,
            ffn_size=self.integer(width_key),
            normalize_top_k=normalize_top_k,
        )

    def layers(self) -> int:
        """Return the number of layers of the model (`num_hidden_layers`)."""
        return self.integer("num_hidden_layers", largest=MAX_LAYERS)

    def dtype(self) -> str:
        """Return the precision of the weights, such as `bfloat16`; float32 if config.json states
        none."""
        name = self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"
        name = name.removeprefix("torch.") if isinstance(name, str) else name
        if name not in DTYPES:
            raise self.error("dtype", name, f"one of {', '.join(DTYPES)}")
        return str(name)

    def dense(self, **extra: Any) -> Architecture:
        """Build the architecture from the keys of config.json that all supported decoders share.

        Args:
            **extra: Fields of `Architecture` that only this family has, or that it reads from other
                keys.

        Raises:
            UserError: If a value is invalid or not supported.
        """
        # Refuse these settings for every family, because SGLang applies them even to models for
        # which transformers ignores them.
        self.refuse("partial_rotary_factor", (None, 1.0))
        self.refuse("final_logit_softcapping")
        self.refuse("quantization_config")
        heads = self.integer("num_attention_heads")
        fields: dict[str, Any] = {
            "family": self.family,
            "num_layers": self.layers(),
            "hidden_size": self.integer("hidden_size"),
            "ffn_size": self.integer("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": self.head_dim(),
            "vocab_size": self.integer("vocab_size"),
            "max_positions": self.integer("max_position_embeddings", 2048),
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "tied_head": self.flag("tie_word_embeddings"),
            "dtype": self.dtype(),
        }
        if "rope" not in extra:
            fields["rope"] = self.rope()
        fields.update(extra)
        architecture = Architecture(**fields)
        if architecture.num_heads % architecture.num_kv_heads:
            raise UserError(
                f"{self.where}: num_attention_heads {architecture.num_heads} is not divisible by "
                f"num_key_value_heads {architecture.num_kv_heads}"
            )
        return architecture


def read_config_json(model_dir: Path | str) -> dict[str, Any]:
    """Return the content of `model_dir/config.json` as a mapping.

    Raises:
        UserError: If `model_dir` or the file is missing, or the file is not a JSON object.
    """
    path = Path(model_dir) / "config.json"
    if not str(model_dir):
        raise UserError("model.path is empty; set it to the directory of a Hugging Face model")
    if not Path(model_dir).is_dir():
        name, target = "ORGANIZATION/NAME", "DIRECTORY"
        if _HUB_NAME.fullmatch(str(model_dir)) and not Path(model_dir).parent.is_dir():
            name, target = str(model_dir), f"models/{Path(model_dir).name}"
        raise UserError(
            f"model.path {str(model_dir)!r} is not a directory (seen from {Path.cwd()}), and a run "
            "downloads nothing. Start where the path leads to the model, or download the model "
            f"with `hf download {name} --local-dir {target}` and set model.path={target}"
        )
    if not path.exists():
        raise UserError(f"model.path {str(model_dir)!r} has no config.json, so it is not a model")
    return read_json_object(path, f"model.path: {path}")


_HUB_NAME = re.compile(r"(?!(?:models|runs|checkpoints|data)/)[A-Za-z0-9][\w.-]*/[\w.-]+")
# Keys of config.json for the context length, in the order in which SGLang looks for them.
_CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)


def served_context(model: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens with which this project lets SGLang serve a model; None
    if config.json states none.

    For a model with YaRN it is the full context (`yarn_context`), otherwise what SGLang reads from
    config.json.

    Args:
        model: The parsed config.json.
    """
    return yarn_context(model) or _read_context(model)


def yarn_context(model: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens of a model with YaRN after scaling; None for any other
    model.

    SGLang itself takes the context length from `max_position_embeddings`. Some files, for instance
    Qwen's, state the unscaled length there, and SGLang would serve such a model only with the
    unscaled length.

    Args:
        model: The parsed config.json.
    """
    context = _read_context(model)
    _, scaling = ConfigReader(model, "SGLang").rope_settings()
    if context is None or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return None
    rope = ConfigReader(model, "SGLang").rope()
    return max(context, int(rope.factor * rope.original_max_positions))


def _read_context(model: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens that SGLang itself reads from a parsed config.json; None
    if the file has none."""
    outer = ConfigReader(model, "SGLang")
    text = ConfigReader(outer.mapping("text_config", model.get("text_config", model)), "SGLang")
    scaling = ConfigReader(text.rope_settings()[1], "SGLang")
    factor = scaling.number("factor", 1.0)
    if (
        _ORIGINAL in scaling.raw
        or scaling.raw.get("rope_type") == "llama3"
        # Gemma 3 has different ropes for its global and its local layers, so SGLang does not
        # multiply the context length by a rope's factor.
        or text.raw.get("model_type") == "gemma3_text"
    ):
        factor = 1.0  # The file states the context length after scaling.
    found = (text.integer(key) for key in _CONTEXT_KEYS if text.raw.get(key) is not None)
    return next((int(factor * length) for length in found), None)

"""The context of a model where it is served: prompt and response together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async.models.architecture import ConfigReader

# In the order in which SGLang looks for the context of a model.
_CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)


def served_context(model: Mapping[str, Any]) -> int | None:
    """The context that SGLang reads from a parsed config.json; None when it has none."""
    outer = ConfigReader(model, "SGLang")
    text = ConfigReader(outer.mapping("text_config", model.get("text_config", model)), "SGLang")
    key = "rope_scaling" if text.raw.get("rope_scaling") else "rope_parameters"
    scaling = ConfigReader(text.mapping(key, text.raw.get(key) or {}), "SGLang")
    stretched = scaling.number("factor", 1.0)
    if (
        "original_max_position_embeddings" in scaling.raw
        or scaling.raw.get("rope_type") == "llama3"
    ):
        stretched = 1.0  # the file gives the length after scaling
    found = (text.integer(key) for key in _CONTEXT_KEYS if text.raw.get(key) is not None)
    return next((int(stretched * length) for length in found), None)

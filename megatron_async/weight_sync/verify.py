"""Do the engines hold what the trainer sent? Pure checks on what engines report.

SGLang accepts a tensor whose name it does not know and ignores it, and its checksums are over its
own fused layout, so that a trainer cannot compute them. Hence four checks, each of which catches
what the others cannot (SEMANTICS.md section 5):

- every name that is sent belongs to a parameter that the engine has (`NameCheck.add`);
- every parameter that the engine has was sent (`NameCheck.finish`);
- all engines report the same checksum (`check_same`);
- the engine's log-probs of a fixed probe sequence are the trainer's (`check_probe`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import FloatArray, IntArray, PolicyVersion

_NAMED = 4
_SCALES = re.compile(r"scale(_inv|_2)?$")
_FUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\."), ".experts.w13_"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\."), ".experts.w2_"),
    (re.compile(r"\.(q_proj|k_proj|v_proj)\."), ".qkv_proj."),
    (re.compile(r"\.(gate_proj|up_proj)\."), ".gate_up_proj."),
)


def engine_parameter(name: str) -> str:
    """SGLang's parameter that holds the Hugging Face tensor `name` (fused QKV, gate/up, experts).

    >>> engine_parameter("model.layers.0.self_attn.k_proj.weight")
    'model.layers.0.self_attn.qkv_proj.weight'
    """
    for pattern, fused in _FUSED:
        replaced, count = pattern.subn(fused, name)
        if count:
            return replaced
    return name


def engine_parameters(checksum_answer: Mapping[str, Any]) -> frozenset[str]:
    """Parameter names in an engine's answer to `weights_checker` (all its ranks)."""
    return frozenset(name for rank in checksum_answer["ranks"] for name in rank["checksums"])


class NameCheck:
    """Compares the names of one update with the parameters that the engines have."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self._sent: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Names about to be sent. Raises ComponentFailure on one that no engine would load."""
        owners = {name: engine_parameter(name) for name in names}
        unknown = [
            name
            for name, owner in owners.items()
            if owner not in self._known and name not in self._known
        ]
        if unknown:
            raise ComponentFailure(
                f"the engines do not know {_listing(unknown)}: they would ignore it silently"
            )
        self._sent.update(owners.values())
        self._sent.update(owners)

    @property
    def sent(self) -> frozenset[str]:
        """Names of this update so far, and the engines' parameters that they belong to."""
        return frozenset(self._sent)

    def sent_before(self, names: Iterable[str]) -> None:
        """What another sender of the same update had in `sent`."""
        self._sent.update(names)

    def finish(self) -> None:
        """The update is complete. Raises ComponentFailure if a parameter was left out.

        Scales of quantised weights are made by the engine and not sent.
        """
        missing = [name for name in self._known - self._sent if _SCALES.search(name) is None]
        if missing:
            raise ComponentFailure(
                f"the update left out {_listing(missing)}, which the engines would keep as it was"
            )


def check_same(checksums: Mapping[str, str], version: PolicyVersion) -> None:
    """Raises ComponentFailure unless all engines (id -> checksum) hold the same weights."""
    if len(set(checksums.values())) > 1:
        listing = ", ".join(f"{engine}: {value[:16]}" for engine, value in checksums.items())
        raise ComponentFailure(f"the engines disagree on the weights of {version}: {listing}")


def probe_tokens(vocab_size: int, length: int) -> IntArray:
    """The fixed probe sequence: tokens spread over the vocabulary by a Weyl sequence, [length]."""
    golden = 0.6180339887498949
    positions = (np.arange(1, length + 1) * golden) % 1.0
    return (positions * vocab_size).astype(np.int32)


def probe_error(engine: FloatArray, trainer: FloatArray) -> tuple[float, float]:
    """Mean and largest |engine - trainer| of raw log-probs of tokens 1..n-1, both [n - 1]."""
    if engine.shape != trainer.shape:
        raise ValueError(f"probe log-probs of shapes {engine.shape} and {trainer.shape}")
    error = np.abs(engine.astype(np.float64) - trainer.astype(np.float64))
    return float(error.mean()), float(error.max())


def check_probe(
    engine_id: str,
    engine: FloatArray,
    trainer: FloatArray,
    tolerance: float,
    version: PolicyVersion,
) -> tuple[float, float]:
    """`probe_error`; raises ComponentFailure if the mean is above `tolerance` or not a number."""
    mean, worst = probe_error(engine, trainer)
    if not mean <= tolerance:
        raise ComponentFailure(
            f"engine {engine_id} does not hold the trainer's weights of {version}: the probe's "
            f"log-probs differ by {mean:.2e} on average, weights.probe_tolerance is {tolerance:.2e}"
        )
    return mean, worst


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(repr(name) for name in ordered[:_NAMED]) + more

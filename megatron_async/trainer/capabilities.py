"""Installed libraries and the backends chosen from them, for the trainer and for `doctor`.

Invariants
- Detection imports nothing heavy that is not there; it never fails because of a broken optional
  package, it reports it.
- A choice depends only on `Capabilities` and the settings, so that `doctor` shows what a run does.
"""

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from megatron_async_kernels.backend import describe_backend, describe_loss

from megatron_async.config.model import ModelConfig
from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture, Experts
from megatron_async.trainer.device import has_cuda

LayerBackend = Literal["local", "transformer_engine"]
ExpertBackend = Literal["sequential", "grouped", "transformer_engine"]
_PER_SEQUENCE = "torch scaled_dot_product_attention, one call per sequence"
_ROW_BYTES = 16
"""torch's grouped_mm wants rows of a multiple of these."""


@dataclass(frozen=True)
class Capabilities:
    """Versions of what is there (None: not installed; "broken: …": installed, does not import)."""

    cuda: str | None
    device_name: str | None
    transformer_engine: str | None
    apex: str | None
    triton: str | None

    @property
    def usable_transformer_engine(self) -> bool:
        return self.cuda is not None and _usable(self.transformer_engine)

    @property
    def usable_apex(self) -> bool:
        return self.cuda is not None and _usable(self.apex)


@dataclass(frozen=True)
class Backends:
    """Backends of the trainer: the layers, with the reason in one clause, decide on the others."""

    found: Capabilities
    layers: LayerBackend
    layers_reason: str
    experts: ExpertBackend = "sequential"

    @property
    def transformer_engine(self) -> bool:
        """The layers, and the rope fused into them, are Transformer Engine's."""
        return self.layers == "transformer_engine"

    @property
    def gradient_accumulation_fusion(self) -> bool:
        """Megatron's own test for its fused weight-gradient kernel (Apex)."""
        kernel = "fused_weight_gradient_mlp_cuda"
        return self.found.cuda is not None and importlib.util.find_spec(kernel) is not None

    def lines(self) -> list[tuple[str, str]]:
        """(part, what and why) rows for `doctor`."""
        found, norm = self.found, "torch rms_norm, sequence-parallel aware"
        if found.cuda is None:
            device = "CPU (no CUDA device); Megatron-core runs through the device adapter, gloo"
            attention = _PER_SEQUENCE
        else:
            device = f"{found.device_name} (CUDA {found.cuda}), NCCL"
            attention = f"torch variable-length flash attention (float32: {_PER_SEQUENCE})"
        if found.usable_apex:
            optimizer = "Apex FusedAdam"
        else:
            optimizer = "torch Adam (neither Transformer Engine nor Apex is usable)"
        if self.transformer_engine:
            attention, norm = "Transformer Engine, packed", "Transformer Engine RMSNorm"
            optimizer = "Transformer Engine FusedAdam"
        fusion = "on" if self.gradient_accumulation_fusion else "off (needs Apex's CUDA extension)"
        return [
            ("device", device),
            ("layers", f"{self.layers} ({self.layers_reason})"),
            ("attention", attention),
            ("norm", norm),
            ("optimizer", optimizer),
            ("token log-probs", describe_backend()),
            ("policy loss", describe_loss(cuda=found.cuda is not None, triton=found.triton)),
            ("gradient accumulation fusion", fusion),
        ]


def _usable(version: str | None) -> bool:
    return version is not None and not version.startswith("broken")


def _version_of(module: str, distribution: str, attribute: str | None = None) -> str | None:
    """The version of an optional package, or why it cannot be imported or is another package."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    try:
        found = importlib.import_module(module)
        if attribute is not None and not hasattr(found, attribute):
            return f"broken: {module} has no {attribute}: not the package that is meant"
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"broken: {type(error).__name__}: {error}"
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "installed (no version)"


@cache
def detect() -> Capabilities:
    """Return the libraries and devices of this machine."""
    cuda = has_cuda()
    return Capabilities(
        cuda=torch.version.cuda if cuda else None,
        device_name=torch.cuda.get_device_name() if cuda else None,
        transformer_engine=_version_of("transformer_engine.pytorch", "transformer-engine"),
        # By its optimizers: PyPI's `apex` is a web toolkit.
        apex=_version_of("apex.optimizers", "apex", "FusedAdam"),
        triton=_version_of("triton", "triton"),
    )


def parameter_dtype(model: ModelConfig) -> torch.dtype:
    """`model.dtype`; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    bf16 = has_cuda() if model.dtype == "auto" else model.dtype == "bfloat16"
    return torch.bfloat16 if bf16 else torch.float32


def choose(
    model: ModelConfig,
    capabilities: Capabilities | None = None,
    architecture: Architecture | None = None,
) -> Backends:
    """The backends of a run with these model settings (and this model, where it is known).

    Raises UserError when `model.attention_backend` or `model.experts` asks for what is not there.
    """
    found = capabilities or detect()
    layers, reason = _layers(model, found, architecture)
    chosen = Backends(found, layers, reason)
    if architecture is None or architecture.experts is None:
        return chosen
    return replace(chosen, experts=_experts(model, chosen, architecture, architecture.experts))


def _experts(model: ModelConfig, chosen: Backends, a: Architecture, experts: Experts) -> Any:
    dtype, cuda = parameter_dtype(model), chosen.found.cuda is not None
    fits = dtype is torch.bfloat16 or not cuda  # float32 on a GPU: not by all versions of torch
    fits &= (a.hidden_size | experts.ffn_size) * dtype.itemsize % _ROW_BYTES == 0
    engine = "transformer_engine" if chosen.transformer_engine else "sequential"
    if model.experts == "auto":
        return "grouped" if fits else engine
    if model.experts == "grouped" and not fits:
        raise UserError(
            "model.experts is grouped, which takes bfloat16 (on a CPU float32 too) and widths of "
            f"whole {_ROW_BYTES} bytes: model.dtype is {model.dtype}, the model's hidden_size "
            f"{a.hidden_size}, the width of its experts {experts.ffn_size}"
        )
    if model.experts == "transformer_engine" != engine:
        raise UserError(
            f"model.experts is transformer_engine, but its layers are not: {chosen.layers_reason}"
        )
    return model.experts


def _layers(
    model: ModelConfig, found: Capabilities, architecture: Architecture | None
) -> tuple[LayerBackend, str]:
    """The layers, and why."""
    wanted = model.attention_backend
    if wanted == "sdpa":
        return "local", "model.attention_backend is sdpa"
    if architecture is not None and architecture.post_norms:
        reason = f"{architecture.family} has layers of its own"
    elif found.usable_transformer_engine:
        reason = f"Transformer Engine {found.transformer_engine} and a GPU"
        return "transformer_engine", reason
    elif found.cuda is None:
        reason = "no CUDA device"
    elif found.transformer_engine is None:
        reason = "Transformer Engine is not installed"
    else:
        reason = f"Transformer Engine is {found.transformer_engine}"
    if wanted == "transformer_engine":
        raise UserError(f"model.attention_backend is transformer_engine, but {reason}")
    return "local", reason

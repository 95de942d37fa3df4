"""Detects installed libraries and chooses the trainer's backends, for the trainer and for `doctor`.

Invariants
- Detection never imports a heavy package that is not installed. A broken optional package is
  reported and never makes detection fail.
- A choice depends only on the detected `Capabilities`, the settings and the model's architecture.
  So `doctor` shows the backends that a run would use.
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
"""torch's `grouped_mm` requires the rows of its matrices to be a multiple of this many bytes."""


@dataclass(frozen=True)
class Capabilities:
    """Versions of the installed libraries, and the name of the GPU.

    A library that is not installed has the version None, and one that is installed but cannot be
    imported has the version "broken: …" with the error. `cuda` and `device_name` are None if there
    is no CUDA device.
    """

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
    """The implementations of transformer layers and experts that the trainer uses.

    Attributes:
        found: Installed libraries.
        layers: Whether Transformer Engine's or local transformer layers (which need no further
            library) are used. The implementation of attention, norms and rotary embeddings follows
            from this.
        layers_reason: Reason for `layers`, as one clause.
        experts: How the experts of a mixture-of-experts model are computed.
    """

    found: Capabilities
    layers: LayerBackend
    layers_reason: str
    experts: ExpertBackend = "sequential"

    @property
    def transformer_engine(self) -> bool:
        """Whether Transformer Engine's layers are used, which apply the rotary embedding in a fused
        kernel."""
        return self.layers == "transformer_engine"

    @property
    def gradient_accumulation_fusion(self) -> bool:
        """Whether Apex's kernel adds weight gradients directly to the gradient buffer, for which it
        must be installed and a CUDA device must exist."""
        kernel = "fused_weight_gradient_mlp_cuda"
        return self.found.cuda is not None and importlib.util.find_spec(kernel) is not None

    def lines(self) -> list[tuple[str, str]]:
        """Return the rows that `doctor` prints: for each component its name, and a text with the
        chosen backend and the reason."""
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
            optimizer = "torch (neither Transformer Engine nor Apex is usable)"
        if self.transformer_engine:
            attention, norm = "Transformer Engine, packed", "Transformer Engine RMSNorm"
            optimizer = "Transformer Engine FusedAdam"
        fusion = "on" if self.gradient_accumulation_fusion else "off (needs Apex's CUDA extension)"
        return [
            ("device", device),
            ("layers", f"{self.layers} ({self.layers_reason})"),
            ("attention", attention),
            ("norm", norm),
            ("Adam", optimizer),
            ("token log-probs", describe_backend()),
            ("policy loss", describe_loss(cuda=found.cuda is not None, triton=found.triton)),
            ("gradient accumulation fusion", fusion),
        ]


def _usable(version: str | None) -> bool:
    return version is not None and not version.startswith("broken")


def _version_of(module: str, distribution: str, attribute: str | None = None) -> str | None:
    """Return the version of an optional package, None if it is not installed, or "broken: …" with
    the error.

    Args:
        module: Module to import.
        distribution: Name of the package on PyPI.
        attribute: Attribute that only the intended package has, if another package on PyPI has the
            same name.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    try:
        found = importlib.import_module(module)
        if attribute is not None and not hasattr(found, attribute):
            return f"broken: {module} has no {attribute}; another package of this name is installed"
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"broken: {type(error).__name__}: {error}"
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "installed (no version)"


@cache
def detect() -> Capabilities:
    """Return the versions of the libraries and the name of the device of this machine."""
    cuda = has_cuda()
    return Capabilities(
        cuda=torch.version.cuda if cuda else None,
        device_name=torch.cuda.get_device_name() if cuda else None,
        transformer_engine=_version_of("transformer_engine.pytorch", "transformer-engine"),
        # The package `apex` on PyPI is a web toolkit. NVIDIA's Apex is recognized by its
        # optimizers.
        apex=_version_of("apex.optimizers", "apex", "FusedAdam"),
        triton=_version_of("triton", "triton"),
    )


def parameter_dtype(model: ModelConfig) -> torch.dtype:
    """Return the dtype of `model.dtype`; `auto` means bfloat16 on CUDA and float32 elsewhere."""
    bf16 = has_cuda() if model.dtype == "auto" else model.dtype == "bfloat16"
    return torch.bfloat16 if bf16 else torch.float32


def choose(
    model: ModelConfig,
    capabilities: Capabilities | None = None,
    architecture: Architecture | None = None,
) -> Backends:
    """Choose the backends of a run with these model settings.

    Args:
        model: The settings.
        capabilities: Installed libraries; None to detect them.
        architecture: Architecture of the model, if known; the experts' backend depends on it.

    Raises:
        UserError: `model.attention_backend` or `model.experts` requires a backend that is not
            available.
    """
    found = capabilities or detect()
    layers, reason = _layers(model, found, architecture)
    chosen = Backends(found, layers, reason)
    if architecture is None or architecture.experts is None:
        return chosen
    return replace(chosen, experts=_experts(model, chosen, architecture, architecture.experts))


def _experts(model: ModelConfig, chosen: Backends, a: Architecture, experts: Experts) -> Any:
    """Return the implementation of the experts.

    Raises:
        UserError: `model.experts` requires an implementation that is not supported here.
    """
    dtype, cuda = parameter_dtype(model), chosen.found.cuda is not None
    # On a GPU, some versions of torch have no grouped_mm in float32.
    fits = dtype is torch.bfloat16 or not cuda
    widths = (a.hidden_size, experts.ffn_size)
    fits &= all(width * dtype.itemsize % _ROW_BYTES == 0 for width in widths)
    engine = "transformer_engine" if chosen.transformer_engine else "sequential"
    if model.experts == "auto":
        return "grouped" if fits else engine
    if model.experts == "grouped" and not fits:
        raise UserError(
            "model.experts is grouped, which requires bfloat16 (or float32 on a CPU) and layer "
            f"widths of a multiple of {_ROW_BYTES} bytes; model.dtype is {model.dtype}, the "
            f"model's hidden_size is {a.hidden_size}, and the width of its experts is "
            f"{experts.ffn_size}"
        )
    if model.experts == "transformer_engine" != engine:
        raise UserError(
            f"model.experts is transformer_engine, but the layers are local: {chosen.layers_reason}"
        )
    return model.experts


def _layers(
    model: ModelConfig, found: Capabilities, architecture: Architecture | None
) -> tuple[LayerBackend, str]:
    """Return which transformer layers are used, local ones or Transformer Engine's, and the reason
    as one clause."""
    requested = model.attention_backend
    if requested == "sdpa":
        return "local", "model.attention_backend is sdpa"
    if architecture is not None and architecture.post_norms:
        reason = f"Transformer Engine has no layers for {architecture.family}"
    elif found.usable_transformer_engine:
        reason = f"Transformer Engine {found.transformer_engine} and a GPU are available"
        return "transformer_engine", reason
    elif found.cuda is None:
        reason = "no CUDA device"
    elif found.transformer_engine is None:
        reason = "Transformer Engine is not installed"
    else:
        reason = f"Transformer Engine is {found.transformer_engine}"
    if requested == "transformer_engine":
        raise UserError(f"model.attention_backend is transformer_engine, but {reason}")
    return "local", reason

"""Installed libraries and the backends chosen from them, for the trainer and for `doctor`.

Invariants
- Detection imports nothing heavy that is not there; it never fails because of a broken optional
  package, it reports it.
- A choice depends only on `Capabilities` and the settings, so that `doctor` shows what a run does.
"""

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from megatron_async_kernels.backend import describe_backend, describe_loss

from megatron_async.config.model import ModelConfig
from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture
from megatron_async.trainer.attention_kernels import PER_SEQUENCE, choose_kernel, find
from megatron_async.trainer.device import has_cuda

LayerBackend = Literal["local", "transformer_engine"]


@dataclass(frozen=True)
class Capabilities:
    """Versions of what is there (None: not installed; "broken: …": installed, does not import)."""

    cuda: str | None
    device_name: str | None
    transformer_engine: str | None
    apex: str | None
    triton: str | None
    attention: str = PER_SEQUENCE.name  # of local layers, in half precision

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
            attention = PER_SEQUENCE.name
        else:
            device = f"{found.device_name} (CUDA {found.cuda}), NCCL"
            attention = f"{found.attention} (float32: one call per sequence)"
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
    kernel = choose_kernel(find) if cuda else PER_SEQUENCE
    return Capabilities(
        cuda=torch.version.cuda if cuda else None,
        device_name=torch.cuda.get_device_name() if cuda else None,
        transformer_engine=_version_of("transformer_engine.pytorch", "transformer-engine"),
        # By its optimizers: PyPI's `apex` is a web toolkit.
        apex=_version_of("apex.optimizers", "apex", "FusedAdam"),
        triton=_version_of("triton", "triton"),
        attention=kernel.name,
    )


def choose(
    model: ModelConfig,
    capabilities: Capabilities | None = None,
    architecture: Architecture | None = None,
) -> Backends:
    """The backends of a run with these model settings (and this model, where it is known).

    Raises UserError when `model.attention_backend` asks for what is not there.
    """
    found = capabilities or detect()
    wanted = model.attention_backend
    if wanted == "sdpa":
        return Backends(found, "local", "model.attention_backend is sdpa")
    if architecture is not None and architecture.post_norms:
        reason = f"{architecture.family} has layers of its own"
    elif found.usable_transformer_engine:
        reason = f"Transformer Engine {found.transformer_engine} and a GPU"
        return Backends(found, "transformer_engine", reason)
    elif found.cuda is None:
        reason = "no CUDA device"
    elif found.transformer_engine is None:
        reason = "Transformer Engine is not installed"
    else:
        reason = f"Transformer Engine is {found.transformer_engine}"
    if wanted == "transformer_engine":
        raise UserError(f"model.attention_backend is transformer_engine, but {reason}")
    return Backends(found, "local", reason)

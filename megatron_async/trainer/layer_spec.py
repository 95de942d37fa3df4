"""Specifies the modules of which a transformer layer consists, for local layers and for Transformer
Engine's layers.

Local layers need no Transformer Engine and run on every device. They consist of Megatron's
tensor-parallel linear layers and this project's packed attention and RMSNorm. `capabilities.choose`
decides which of the two kinds is used.
"""

from functools import partial
from typing import Any, Final

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_async.models.architecture import Architecture
from megatron_async.trainer.capabilities import Backends
from megatron_async.trainer.experts import GroupedLinear
from megatron_async.trainer.modules import (
    PackedAttention,
    RMSNorm,
    RowParallelLinearNorm,
    TorchRouter,
)

GROUPED_EXPERTS: Final = ModuleSpec(
    module=TEGroupedMLP,
    submodules=MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear),
)


def block_spec(
    architecture: Architecture, config: TransformerConfig, backends: Backends
) -> TransformerBlockSubmodules:
    """Return the specification of this pipeline stage's layers and of the model's final norm."""
    layer, norm = _local_layer_spec(architecture), RMSNorm
    if backends.transformer_engine:
        layer, norm = _transformer_engine_layer_spec(architecture, backends)
    if backends.experts == "grouped":
        _submodules(layer.submodules.mlp).experts = GROUPED_EXPERTS
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm
    )


def _submodules(spec: Any) -> Any:
    """Return the submodules of a module's specification. Newer versions of Megatron store them as
    an argument of a `functools.partial`."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def _local_layer_spec(architecture: Architecture) -> ModuleSpec:
    """Return the specification of a local layer, which needs no Transformer Engine: Megatron's
    modules with this project's packed attention and RMSNorm."""
    qk_norm = RMSNorm if architecture.qk_norm else IdentityOp
    row_linear = RowParallelLinearNorm if architecture.post_norms else RowParallelLinear
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=PackedAttention,
                    linear_proj=row_linear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_local_feed_forward(architecture, row_linear),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _local_feed_forward(architecture: Architecture, row_linear: type) -> ModuleSpec:
    """Return the specification of a local layer's feed-forward part, which is an MLP or a mixture
    of experts. `row_linear` is the class of an MLP's second linear layer."""
    if architecture.experts is not None:
        return ModuleSpec(
            module=MoELayer,
            submodules=MoESubmodules(
                router=TorchRouter,
                experts=ModuleSpec(
                    module=SequentialMLP,
                    submodules=MLPSubmodules(
                        linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                    ),
                ),
            ),
        )
    return ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=row_linear),
    )


def _transformer_engine_layer_spec(
    architecture: Architecture, backends: Backends
) -> tuple[ModuleSpec, Any]:
    """Return the specification of Transformer Engine's layer, and the class of its norm. In this
    layer, attention supports packed streams, and the norms before attention and before an MLP are
    fused into the linear layers after them."""
    from megatron.core.extensions.transformer_engine import TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=architecture.experts.num if architecture.experts else None,
        moe_grouped_gemm=backends.experts == "transformer_engine",
        qk_layernorm=architecture.qk_norm,
    )
    return layer, TENorm

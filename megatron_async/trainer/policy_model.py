"""`PolicyModel`: Megatron's GPTModel on packed streams, returning log-probs of tokens, not logits.

Invariants
- No tensor of size tokens * vocabulary exists in the forward or backward pass: the last stage
  passes hidden states and the vocabulary-parallel head to `token_logprob`, which works in chunks.
- Only the hidden states that predict response tokens reach the head.
- Hidden states keep Megatron's layout [T, 1, D]. Under sequence parallelism with tensor size tp it
  is [T / tp, 1, D]. The stream is then padded to a multiple of tp by one dummy sequence, which
  affects no other token and has no response tokens.
"""

import logging
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_async_kernels import token_logprob
from torch import Tensor

from megatron_async.config.model import ModelConfig, ParallelConfig, TrainerConfig
from megatron_async.models.architecture import Architecture
from megatron_async.models.families import read_architecture
from megatron_async.models.layout import check_layout
from megatron_async.models.parameters import local_parameters
from megatron_async.trainer.capabilities import Backends, choose
from megatron_async.trainer.device import current_device
from megatron_async.trainer.experts import forget_routing
from megatron_async.trainer.hf_config import transformer_config
from megatron_async.trainer.layer_spec import block_spec
from megatron_async.trainer.packed import PackedInputs, TokenLogprobs
from megatron_async.trainer.parallel import seed_everything
from megatron_async.trainer.rotary import (
    RotaryStream,
    Rotation,
    inverse_frequencies,
    rotary_angles,
)

logger = logging.getLogger(__name__)


class PolicyModel(GPTModel):
    """One pipeline stage of the policy, as a Megatron GPTModel."""

    def __init__(
        self,
        architecture: Architecture,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules,
        backends: Backends,
        logprob_chunk_tokens: int,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=architecture.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=architecture.tied_head,
            position_embedding_type="none",
        )
        self.architecture = architecture
        self.backends = backends
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self._mark_experts()
        for module in self.modules():
            if isinstance(module, MoELayer):
                module.register_forward_hook(forget_routing)
                module.register_full_backward_hook(forget_routing)
        # Plain attributes instead of buffers: they are not saved, and they stay in float32 if the
        # model is cast to another precision.
        ropes = [rope for rope in (architecture.rope, architecture.local_rope) if rope is not None]
        self._inv_freqs = [inverse_frequencies(rope, architecture.head_dim) for rope in ropes]

    def forward(
        self, packed: PackedInputs, *, temperature: float = 1.0, return_entropy: bool = False
    ) -> TokenLogprobs | Tensor:
        """Return the log-probs of the response tokens on the last pipeline stage, and hidden states
        on earlier stages.

        `temperature` divides the logits, as it did when the tokens were sampled.
        """
        stream = self._pad_for_sequence_parallel(packed)
        hidden: Tensor | None = None
        if self.pre_process:
            hidden = self.embedding(input_ids=stream.token_ids_T[None], position_ids=None)
            if self.architecture.scale_embeddings:
                hidden = hidden * self._embedding_scale(hidden.dtype)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self._angles_of_the_longest(stream),
            packed_seq_params=self._packed_seq_params(stream),
        )
        if not self.post_process:
            return hidden
        return self._token_logprobs(hidden, stream, temperature, return_entropy)

    def head_weight(self) -> Tensor:
        """Return this rank's shard of the head's weight, [V / tp, D]. With tied embeddings, it is
        the weight of the embedding."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _mark_experts(self) -> None:
        """Mark expert parameters, so that Megatron sums their gradients over all ranks with the
        same experts.

        Experts are not split over tensor ranks: each tensor rank sends its own tokens through whole
        experts, so these ranks have to sum their gradients too. The mark, `allreduce` False,
        selects the group of ranks that does this. Megatron sets the mark itself only if
        `parallel.expert` is above 1.
        """
        for placed in local_parameters([self], self.architecture):
            if placed.rule.expert:
                placed.parameter.allreduce = False  # type: ignore[attr-defined]

    def _pad_for_sequence_parallel(self, packed: PackedInputs) -> PackedInputs:
        """Return `packed` with a dummy sequence that makes the number of tokens a multiple of the
        tensor-parallel size, as sequence parallelism requires.

        If the number is such a multiple, or without sequence parallelism, `packed` is returned
        unchanged.
        """
        multiple = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        missing = -packed.num_tokens % multiple
        if not missing:
            return packed
        filler = torch.arange(missing, device=packed.token_ids_T.device)
        return replace(
            packed,
            token_ids_T=F.pad(packed.token_ids_T, (0, missing)),
            position_ids_T=torch.cat((packed.position_ids_T, filler)),
            cu_seqlens_S1=torch.cat((packed.cu_seqlens_S1, packed.cu_seqlens_S1[-1:] + missing)),
            max_seqlen=max(packed.max_seqlen, missing),
        )

    def _packed_seq_params(self, stream: PackedInputs) -> PackedSeqParams:
        """Return what attention needs to know about the packed sequences in `stream`: their borders
        and, for local layers, the rotary rotation of each token."""
        borders = {
            "cu_seqlens_q": stream.cu_seqlens_S1,
            "cu_seqlens_kv": stream.cu_seqlens_S1,
            "max_seqlen_q": stream.max_seqlen,
            "max_seqlen_kv": stream.max_seqlen,
        }
        if self.backends.transformer_engine:
            return PackedSeqParams(qkv_format="thd", **borders)
        # If `qkv_format` were `thd`, Megatron would remove the batch axis, but PackedAttention
        # expects [T, 1, heads, head_dim].
        rotations = tuple(
            Rotation.of(inv_freq, stream.position_ids_T)
            for inv_freq in self._inverse_frequencies(stream.token_ids_T.device)
        )
        return RotaryStream(qkv_format="sbhd", rotations=rotations, **borders)

    def _angles_of_the_longest(self, stream: PackedInputs) -> Tensor | None:
        """Return the rotary angles for Transformer Engine's layers; None for other layers.

        Transformer Engine's fused kernel counts positions from 0 in each sequence, so it needs only
        one table of angles, as long as the longest sequence.
        """
        if not self.backends.transformer_engine:
            return None
        device = stream.token_ids_T.device
        [inv_freq] = self._inverse_frequencies(device)
        return rotary_angles(inv_freq, torch.arange(stream.max_seqlen, device=device))

    def _inverse_frequencies(self, device: torch.device) -> list[Tensor]:
        """Return the inverse rotary frequencies on `device`. They are moved to the device at the
        first call only."""
        self._inv_freqs = [inv_freq.to(device) for inv_freq in self._inv_freqs]
        return self._inv_freqs

    def _embedding_scale(self, dtype: torch.dtype) -> float:
        """Return sqrt(D), by which Gemma multiplies embeddings of width D. It is rounded to
        `dtype`, the model's precision, as in Gemma's published code."""
        return float(torch.tensor(self.config.hidden_size**0.5, dtype=dtype))

    def _token_logprobs(
        self, hidden: Tensor, stream: PackedInputs, temperature: float, return_entropy: bool
    ) -> TokenLogprobs:
        """Return the log-probs (and entropies) of the response tokens from the last hidden
        states."""
        rows_R = stream.response_index_R - 1
        # The hidden state at position t - 1 predicts token t. Hidden states whose prediction is not
        # requested are skipped.
        targets_T = stream.token_ids_T.roll(-1)
        weight = self.head_weight()
        # The gradient of the head is as large as the head. To avoid another tensor of this size,
        # the kernel adds it directly to Megatron's gradient buffer (`main_grad`), in the buffer's
        # precision. Megatron's own layers need Apex for this.
        main_grad = getattr(weight, "main_grad", None) if torch.is_grad_enabled() else None
        result = token_logprob(
            hidden.squeeze(1),
            weight,
            targets_T,
            temperature=temperature,
            return_entropy=return_entropy,
            token_rows=rows_R,
            tp_group=self.pg_collection.tp,
            sequence_parallel=self.config.sequence_parallel,
            weight_grad_out=main_grad,
            vocab_size=self.architecture.vocab_size,
            chunk_tokens=self.logprob_chunk_tokens,
        )
        if isinstance(result, tuple):
            logprobs_T, entropy_T = result
            return TokenLogprobs(logprobs_T[rows_R], entropy_T[rows_R])
        return TokenLogprobs(result[rows_R], None)


def build_policy(
    model_config: ModelConfig, parallel: ParallelConfig, *, trainer: TrainerConfig, seed: int
) -> list[PolicyModel]:
    """Build this rank's part of the model; its weights are zero until `load_hf_weights` fills them.

    Call this after `init_parallel`, inside `device_adapter()`. The result is a list with one model
    chunk, as Megatron's functions expect.

    Raises:
        UserError: The model directory, backend or layout is not supported.
    """
    architecture = read_architecture(model_config.path, model_config.family)
    check_layout(architecture, parallel)
    backends = choose(model_config, architecture=architecture)
    logger.info("layers: %s; experts, if any: %s", backends.layers, backends.experts)
    config = transformer_config(architecture, model_config, parallel, trainer, backends)
    seed_everything(seed)
    spec = block_spec(architecture, config, backends)
    model = PolicyModel(architecture, config, spec, backends, trainer.logprob_chunk_tokens)
    for parameter in model.parameters():  # Megatron creates the weights of routers in host memory.
        parameter.data = parameter.data.to(device=current_device())
    return [model]

"""The Megatron-core trainer; one code path on CPU and GPU.

- step: `PolicyTrainer`: what one batch does to policy and optimizer, and its report; the weights
  of a frozen reference policy.
- optimizer: Adam or muon, the learning rate, clipping; an update that is not finite is skipped on
  every rank.
- microbatch: sequences to microbatches, balanced by cost; pure.
- forward, packed: microbatches through Megatron's schedule, as packed token streams.
- policy_model: GPTModel that ends in token log-probs, not logits.
- layer_spec, hf_config: Megatron modules and configuration of an architecture.
- modules: what Megatron lacks or has for GPUs alone: attention, norms, a router.
- rotary: rotary embeddings, computed and applied in float32.
- experts: the linear layers of all experts of a rank in one product.
- attention_kernels: attention over a packed stream.
- parallel: torch.distributed and Megatron's parallel state. replicas: copies that must be equal.
- device: the device adapter, all that running on a CPU means. capabilities: TE, Apex, NCCL or not.
- offload: device memory given away while engines generate, and taken back.
"""

"""The Megatron-core trainer, which runs the same code on CPU and GPU.

- step: `PolicyTrainer` trains policy and optimizer on one batch and reports the result; it also
  keeps the weights of a frozen reference policy.
- optimizer: Adam or Muon, the learning rate, gradient clipping. An update whose loss or gradient is
  not finite is skipped on every rank.
- muon: the optimizer Muon.
- microbatch: groups sequences into microbatches of balanced cost, by pure functions.
- forward, packed: run microbatches, as packed token streams, through Megatron's pipeline schedule.
- policy_model: Megatron's GPTModel, changed so that it returns log-probs of tokens instead of
  logits.
- layer_spec, hf_config: Megatron's modules and configuration for a model architecture.
- modules: attention, norms and a router that Megatron does not have, or has only for GPUs or only
  with Transformer Engine.
- rotary: rotary embeddings, computed and applied in float32.
- experts: computes the linear layers of all experts of a rank in one matrix product.
- attention_kernels: attention over a packed token stream.
- parallel: sets up torch.distributed and Megatron's parallel state.
- replicas: checks that copies of weights are equal on all ranks.
- device: the device adapter, which makes Megatron run on a CPU.
- capabilities: detects Transformer Engine, Apex and CUDA, and chooses backends.
- offload: moves the trainer off its device while engines generate, and back.
"""

"""Weight exchange: a policy version from the trainer to the engines.

- publisher: the collective export and the senders, as one call on every rank; which ranks send.
- transports: the ways to the engines: distributed, tensor, disk, delta.
- verify: do engines hold what was sent? Names, checksums and log-prob ratios, the only such rules.
- stage_order: senders of several pipeline stages, one after the other. gpu_sharing: the rank that
  sends to an engine on the trainer's own GPUs.
- version_directory: a version as a directory, there whole or not at all.
- blocks, receiver: differences between versions; the engine's end of `delta`, which checks digests.
- lost_engines: finds the engines that caused the failure of a broadcast.
- nccl_errors: a lost engine fails an update, not the trainer or the other engines.
- prefetch, background_stage: one bucket travels while another is loaded.
- quantize: fp8 weights for engines that hold them so.
- http: calls to engines, every one with a limit; failures name the engine.
"""

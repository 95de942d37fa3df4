"""Sends a policy version from the trainer to the engines, and verifies that they have loaded it.

- publisher: exports the weights and sends them, by one call that every trainer rank makes; chooses
  the ranks that send.
- transports: how weights reach the engines: distributed, tensor, disk, delta.
- verify: checks that engines have the weights that were sent: by parameter names, by checksums, and
  by comparing log-probs with the trainer's.
- stage_order: makes the senders of several pipeline stages send one after the other.
- gpu_sharing: finds the trainer ranks on an engine's GPUs, whose memory the engine reads.
- version_directory: a published version as a directory that exists completely or not at all.
- blocks: computes and applies the differences between two versions.
- receiver: the engine's side of the transport `delta`, which applies differences and checks
  checksums.
- lost_engines: finds the engines that caused a broadcast to fail.
- nccl_errors: torch's settings of NCCL groups with which the loss of an engine makes an update
  fail but ends no other process.
- prefetch, background_stage: transfer one bucket (tensors that are sent together) while another is
  loaded.
- quantize: converts weights to fp8 for engines that use it.
- http: calls to engines, each with a time limit; errors name the engine.
"""

"""Sends a policy version from the trainer to the engines, and verifies that they have loaded it.

- publisher: exports and sends the weights, as one call on every rank; chooses the ranks that send.
- transports: how weights reach the engines: distributed, tensor, disk, delta.
- verify: checks that engines have what was sent, by names, checksums and log-prob ratios.
- stage_order: lets the senders of several pipeline stages send one after the other.
- gpu_sharing: finds the rank that sends to an engine on the trainer's own GPUs.
- version_directory: a published version as a directory that exists completely or not at all.
- blocks: differences between two versions.
- receiver: the engine's side of `delta`, which applies differences and checks digests.
- lost_engines: finds the engines that caused a broadcast to fail.
- nccl_errors: error handling with which a lost engine fails an update, but no process.
- prefetch, background_stage: transfer one bucket while another is loaded.
- quantize: converts weights to fp8 for engines that use it.
- http: calls to engines, each with a time limit; errors name the engine.
"""

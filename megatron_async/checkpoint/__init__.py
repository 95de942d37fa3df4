"""Saves the trainer's state to sharded checkpoints, verifies them, and loads them at any layout.

- manager: saves, finds, loads and prunes the checkpoints of one run.
- manifest: the commit record. A directory without a manifest is not a checkpoint; a checkpoint
  exists completely or not at all.
- writer: one rank's share of a save: a copy in memory, then files, then (on rank 0) the commit.
- state: describes a trainer as named tensors, which a save writes and a load fills at any layout.
  Also loads only the weights into the model of a new run (`model.checkpoint`).
- placement: the name and the whole shape of each parameter, and the boxes of each shard. Names do
  not depend on the layout.
- files: slices of tensors in safetensors format; each file has one writer.
- checksum: checksums whose sum over the slices is the checksum of the tensor; every tensor is
  compared after a load.
- collective: how the ranks agree about a checkpoint. No rank proceeds alone after a fault.
- random_state: the states of a rank's random generators as named tensors.
- convert: Hugging Face directories to checkpoints and back, without building a model.

This package imports nothing on its own import: a command that only looks for a manifest must not
wait for the trainer's packages.
"""

"""Checkpoints of the trainer: sharded, verified, finalized by a manifest, loadable elsewhere.

- manager: save, find, load and retain the checkpoints of one run.
- manifest: the commit record. A directory without it is no checkpoint; it exists whole or not at
  all.
- writer: a save by one rank: a copy in memory, then files, then (on rank 0) the commit.
- state: a trainer as named tensors, taken for a save and put back at any layout; the weights alone
  into the model of a new run (`model.checkpoint`).
- placement: name, whole shape and boxes of each shard; names do not depend on the layout.
- files: pieces of tensors in safetensors format, one writer to a file.
- checksum: checksums that add over pieces; every tensor is compared after a load.
- collective: how the ranks agree about a checkpoint. No rank goes on alone after a fault.
- random_state: the random states of a rank as named tensors.
- convert: Hugging Face directories to checkpoints and back, without building a model.

Nothing is imported here: who only looks for a manifest must not wait for the trainer's packages.
"""

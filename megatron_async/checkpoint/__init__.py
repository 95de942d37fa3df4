"""Saves the trainer's state to sharded checkpoints, verifies them, and loads them at any layout. A
layout is the division of the model over ranks: the sizes of tensor, pipeline, data, context and
expert parallelism.

- manager: saves, finds, loads and prunes the checkpoints of one run.
- manifest: the file that is written last and makes a directory a checkpoint. A directory without a
  manifest is not a checkpoint, so a checkpoint exists completely or not at all.
- writer: one rank's share of a save: copies the state in memory, writes the copy to files, and on
  rank 0 commits the checkpoint.
- state: describes a trainer as named tensors, which a save writes and a load fills at any layout.
  Also loads only the weights into the model of a new run (`model.checkpoint`).
- placement: the name and the whole shape of each parameter, and which rectangles of it each rank's
  shard contains. Names do not depend on the layout.
- files: slices of tensors in safetensors format; each file has one writer.
- checksum: a checksum of tensors that is the sum of the checksums of their slices. With it, every
  tensor is compared with the saved one after a load, whatever the layout.
- collective: operations by which all ranks get the same error if one rank finds a fault, so that
  none continues by itself.
- random_state: the states of a rank's random generators as named tensors.
- convert: Hugging Face directories to checkpoints and back, without building a model.

Importing the package imports none of its modules, because a command that only looks for a manifest
must not wait for the import of the trainer's libraries.
"""

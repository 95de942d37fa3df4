"""Provides the transports, which are the ways to send the weights of a policy version to the
engines (`weights.transport`).

- base: the interface, update sessions and time limits of all transports. `weight_sync.publisher`
  chooses the transport of a run.
- distributed: broadcasts over a process group with the engines (gloo or NCCL).
- tensor: HTTP requests on one host that contain the values, or CUDA IPC handles of the memory that
  has them.
- flat_bucket: packs a bucket (tensors that are sent together) into one byte tensor, which
  `distributed` and `tensor` send.
- disk: files in a directory that trainer and engines share.
- delta: files with the differences from the previous version, for slow networks.
"""

"""Provides the transports of a policy version to the engines (`weights.transport`).

- base: the interface, sessions and time limits of all transports. `publisher` chooses a transport.
- distributed: collective broadcast.
- tensor: by value or by CUDA IPC handle, on one host.
- flat_bucket: a bucket as one byte tensor, which `distributed` and `tensor` send.
- disk: a shared directory.
- delta: differences from the previous version, for slow links.
"""

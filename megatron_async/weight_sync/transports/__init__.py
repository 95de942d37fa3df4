"""Transports of a policy version to the engines (`weights.transport`).

- base: the interface, sessions and time limits that all share. The choice is in `publisher`.
- distributed: collective broadcast. tensor: by value or CUDA IPC handle on one host.
- flat_bucket: a bucket as one byte tensor, which both of them send.
- disk: a shared directory. delta: differences from the version before, for slow links.
"""

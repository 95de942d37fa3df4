"""The Python process that this code runs in: its time, its memory and the code that it loads.

- blocking: coroutines for code that blocks.
- time_limits: limits that count only the seconds in which the process could run.
- garbage_collection: searches for garbage, rare or none where they find nothing.
- import_path: the user's code by import path. host_buffers: host memory that copies use again.
- outcome: what a call of a user's code returned or raised, as a value.
- gpus: whether there is a GPU, without importing torch where there cannot be one. prctl: attributes
  of a process on Linux.
"""

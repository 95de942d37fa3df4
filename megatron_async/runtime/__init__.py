"""Controls the Python process: its time limits, garbage collection, memory and imports.

- blocking: runs coroutines from blocking code.
- time_limits: limits that count only the seconds in which the process could run.
- garbage_collection: makes garbage collection rarer, or disables it, where it finds nothing.
- import_path: loads a user's code by import path. host_buffers: host memory that copies reuse.
- outcome: calls a user's function and returns its result, or its exception instead of raising it.
- gpus: whether there is a GPU, without importing torch if there cannot be one. prctl: process
  attributes that only Linux has.
"""

"""Controls the Python process: its time limits, garbage collection, memory and imports.

- blocking: runs coroutines from blocking code.
- time_limits: limits that count only the seconds in which the process could run.
- garbage_collection: makes garbage collection rarer, or disables it, where it finds nothing.
- import_path: loads a user's code by import path. host_buffers: host memory that copies reuse.
- outcome: the result or exception of a call of a user's code, as a value.
- gpus: whether there is a GPU, without importing torch if there cannot be one. prctl: process
  attributes that only Linux has.
"""

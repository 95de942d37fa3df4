"""Helpers for tests and experiments, which users may import too.

- local: runs a whole training in one process, with one trainer rank, on engines that the caller has
  started.
"""

"""Starts, calls, watches and ends objects that run in separate processes, on one or many machines.

- backend: the protocol that the product uses, and its errors. addresses: connects to a backend that
  another process has opened.
- local: processes of this machine, called over Unix sockets. host: the program of such a process.
- sockets: calls over Unix sockets. child_process: starts and ends child processes of every kind,
  and explains how they ended.
- on_ray: actors of a Ray cluster. ray_cluster: starting a cluster, its token and its files. Only
  these two modules import Ray.
- remote_object: converts calls, results and errors to bytes, and runs an object inside its process.
  Both backends use it.
"""

"""Start, call, watch and end a class in a process of its own, on this machine or on many.

- backend: the protocol that the product uses, and its errors. addresses: finds a backend again.
- local: processes of this machine, called over Unix sockets. host: such a process from inside.
- sockets: their calls. child_process: starts, explains and ends child processes of every kind.
- on_ray: actors of a Ray cluster. ray_cluster: that cluster's start, its key and its files. Only
  these two import Ray.
- remote_object: the object in its process, alike in both: it packs what its methods
  return or raise.
"""

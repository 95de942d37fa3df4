"""Stand-ins that users' own tests may import too.

- local: a whole run inside one process: one trainer rank, engines that are there, no Ray.
"""

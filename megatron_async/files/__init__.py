"""Provides file-system helpers: safe writes, locks, mounts, private directories, package files.

- disk: translates disk errors, appends JSON lines, replaces files atomically.
- lock: the exclusive lock of one process. mounts: the kind of file system that a path is on.
- bounded_log: the log of a child process, of limited size however much the process prints.
- private_directory: directories below /tmp that only the current user can access.
- package_files: launch scripts and example configurations that come with the package.
"""

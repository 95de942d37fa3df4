"""Files as the operating system has them: disks, locks, mounts, and those of the package.

- disk: writing to a disk that may be full or not this user's; files of lines; atomic replacement.
- lock: the exclusive lock of one process. mounts: what kind of file system a path is on.
- bounded_log: the log of a child process, of limited size whatever it prints.
- private_directory: directories below /tmp that only this user reaches.
- package_files: launch scripts and example configurations that come with the package.
"""

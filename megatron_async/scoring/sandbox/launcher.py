"""Launcher program: runs one program of a response in a sandbox, and kills the processes that it
leaves running.

A scorer process starts this file by its path, with an interpreter that has only the standard
library:

    launcher ─ fork ─ outer: new namespaces ─ fork ─ init: file system, limits ─ fork ─ program

Invariants
- The program runs with a clean environment, in a separate session and directory, with resource
  limits, and as another user if the launcher is root. (A trusted program, `apart` false in the
  specification, keeps the launcher's user.)
- With `namespaces` the program sees no network, only its own processes, and of the file system only
  the listed directories, read-only, and a writable directory in memory. Without `namespaces` it
  sees the machine's network, processes and files; the other invariants still hold.
- With `namespaces`, no process of the program is left when the launcher ends, even if the launcher
  is killed. Without `namespaces`, the launcher kills the processes that it finds before it ends; if
  it is killed, they may remain.
- The program has only the three standard descriptors, so only the launcher can write the report.
- All memory that the program can get is counted. System calls that create memory outside of any
  process, or new namespaces in which the program could mount more memory, are refused.
"""

import ctypes
import errno
import json
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_NEWUSER = 0x10000000
_CLONE = 0x00020000 | 0x08000000 | 0x04000000 | _NEWUSER | 0x20000000 | 0x40000000
"""Flags of all new namespaces: NEWNS, NEWIPC, NEWUTS, NEWUSER, NEWPID, NEWNET."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
# Mount options that a remount must repeat (noatime and others): flag of statvfs -> flag of mount.
_MS_KEPT = {1024: 1024, 2048: 2048, 4096: 1 << 21}
_MNT_DETACH = 2
PDEATHSIG, SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38
_USER, _NOBODY = 1000, 65534
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_READ = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SET_SECCOMP, _FILTER = 22, 2
_ALLOW, _REFUSE, _NOT_THERE = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
_CALLS = {
    "x86_64": (0xC000003E, 56, (319, 447, 29, 68, 64, 272, 425)),
    "aarch64": (0xC00000B7, 220, (279, 447, 194, 186, 190, 97, 425)),
}
"""For each machine architecture: its audit number, the number of `clone`, and those of the refused
system calls: memfd_create, memfd_secret, shmget, msgget, semget, unshare, io_uring_setup."""
_CLONE3 = 435
_WATCH_SECONDS = 0.05
_HOME = "box"
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library; raise OSError if it returns an error."""
    if getattr(_libc, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process with the system call `prctl`; raise OSError if it fails."""
    _call("prctl", option, value, 0, 0, 0)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount `source` on `target` with the system call `mount`; raise OSError if it fails."""
    texts = [text.encode() for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), data.encode() or None)


# ---------------------------------------------------------------- the program's file system


def _bind(source: str, root: str) -> None:
    """Mount the file or directory `source` read-only at the same path under `root`.

    Everything that is mounted below `source` is included.
    """
    target = root + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(source, target, "", _MS_BIND | _MS_REC)
    below = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for path in below:
        if path == target or path.startswith(f"{target}/"):
            found = os.statvfs(path).f_flag
            flags = found & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
            flags |= sum(new for old, new in _MS_KEPT.items() if found & old)
            _mount("", path, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)


def _make_root(root: str, readable: list[str], disk_mib: int) -> None:
    """Build a file system in memory at `root`, and make it the root of this mount namespace.

    It has the system's programs and libraries and the directories `readable`, all read-only, some
    devices, /proc if permitted, and at most `disk_mib` MiB of writable memory.
    """
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    size = f"size={disk_mib}m,nr_inodes=16384,mode=755"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    for name in _LINKED:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            _bind(f"/{name}", root)
    wanted: list[str] = []
    for path in sorted({os.path.realpath(path) for path in (*_READ, *readable)}):
        if os.path.exists(path) and not any(path.startswith(f"{w}/") for w in wanted):
            wanted.append(path)
            _bind(path, root)
    # If a readable path is a symbolic link, its target was mounted above. Make a link at the same
    # path in the new file system.
    for path in readable:
        if os.path.realpath(path) != path and not os.path.lexists(root + path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.path.realpath(path), root + path)
    os.mkdir(f"{root}/dev")
    for name in _DEVICES:
        Path(f"{root}/dev/{name}").touch()
        _mount(f"/dev/{name}", f"{root}/dev/{name}", "", _MS_BIND)
    for name in ("tmp", "dev/shm"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", 0o1777)
    os.mkdir(f"{root}/proc")
    with suppress(OSError):  # A container that masks parts of /proc forbids mounting a new one.
        _mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _write_files(folder: Path, files: dict[str, str], owner: int | None) -> None:
    """Create `folder` with `files`, which maps names to contents, and give all of it to `owner`.

    If `owner` is None, the folder and the files belong to this process's user.
    """
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    if owner is not None:
        for path in (folder, *folder.iterdir()):
            os.chown(path, owner, owner)


# ---------------------------------------------------------------- the program


def _become(user: int) -> None:
    """Change this process's user and group to the ID `user`, without supplementary groups."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _tasks(spec: dict[str, Any]) -> int:
    """Return the value of RLIMIT_NPROC, the maximum number of the program's processes and threads.

    The kernel counts all processes of one user together, but a program that runs as another user is
    counted separately. So is, from kernel 5.14 on, a program in a separate user namespace. If the
    program is not counted separately, the result is unlimited, because other processes of this user
    would count too.
    """
    release = tuple(int(number) for number in os.uname().release.split(".")[:2])
    counted_separately = spec["other_user"] or (spec["namespaces"] and release >= (5, 14))
    # Allow one process more than the setting, because the sandbox's init process counts too.
    return spec["processes"] + 1 if counted_separately else resource.RLIM_INFINITY


def _limit(spec: dict[str, Any]) -> None:
    """Set the resource limits of `spec` for this process, which later becomes the program."""
    memory = spec["memory_mib"] << 20
    disk = spec["disk_mib"] << 20
    for what, value in (
        # Limit data and not address space: a mapped file takes address space but no memory.
        (resource.RLIMIT_DATA, memory),
        # Remove the limit that the scorer process has set for itself and that is inherited.
        (resource.RLIMIT_AS, resource.RLIM_INFINITY),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NPROC, _tasks(spec)),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(spec["seconds"]) + 1),
    ):
        hard = resource.getrlimit(what)[1]
        least = [limit for limit in (value, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(what, (min(least, default=value),) * 2)


class _Filter(ctypes.Structure):
    """The C structure `sock_fprog`: a seccomp filter program and the number of its instructions."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def _refuse_calls() -> None:
    """Install a seccomp filter that refuses the system calls of `_CALLS` in this process.

    It also refuses `clone` for a new user namespace, and reports `clone3` as not implemented.

    Raises:
        OSError: If the filter cannot be installed, or the machine's architecture is unknown.
    """
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"no filter of system calls exists for {machine}")
    mark, clone, refused = _CALLS[machine]
    load, equal, least, bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse = (end, 0, 0, _REFUSE)
    steps = [(load, 0, 0, 4), (equal, 1, 0, mark), refuse, (load, 0, 0, 0)]
    # On x86_64 a system call can also be made by its x32 number, which is at least 2^30. Refuse
    # those numbers, because they would bypass the checks below.
    steps += [(least, 0, 1, 1 << 30), refuse]
    for number in refused:
        steps += [(equal, 0, 1, number), refuse]
    # Let clone3 fail as if it did not exist, because a filter cannot see its arguments. The C
    # library then uses clone, whose flags are checked next.
    steps += [(equal, 0, 1, _CLONE3), (end, 0, 0, _NOT_THERE)]
    steps += [(equal, 0, 3, clone), (load, 0, 0, 16), (bits, 0, 1, _NEWUSER), refuse]
    steps.append((end, 0, 0, _ALLOW))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    _call("prctl", _SET_SECCOMP, _FILTER, ctypes.byref(_Filter(len(steps), code)), 0, 0)


def _exec(spec: dict[str, Any], home: str) -> None:
    """Replace this process by the program of `spec`, with its limits; never return normally.

    Args:
        spec: The specification of the program.
        home: The program's working directory.
    """
    os.setsid()
    os.chdir(home)
    prctl(_NO_NEW_PRIVS, 1)
    # Python ignores these signals, and a program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    _limit(spec)
    if spec["apart"]:
        try:
            _refuse_calls()
        except OSError:
            # The program may run without the filter if there are no namespaces either. The caller
            # knows then that isolation is missing.
            if spec["namespaces"]:
                raise
    os.closerange(3, 1 << 16)
    environment = {
        "PATH": spec["path"],
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **spec["environment"],
    }
    try:
        os.execvpe(spec["command"][0], spec["command"], environment)
    except OSError as error:
        print(f"{spec['command'][0]} cannot be run: {error.strerror}", file=sys.stderr)
    os._exit(127)


def _fork() -> int:
    """Fork a child that is killed when its parent ends; return its ID, or 0 in the child."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        prctl(PDEATHSIG, signal.SIGKILL)
        # If the parent ended before `prctl`, this process has another parent. An ID of 0 means that
        # the parent is in another process namespace, where its ID is not visible.
        if os.getppid() not in (parent, 0):
            os._exit(1)
    return child


def _wait_for(child: int) -> int:
    """Wait until the process `child` ends; return its exit code, 128 + n if signal n ended it.

    Other children that end before are reaped.
    """
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _in_namespaces(spec: dict[str, Any], root: str, ready: int, mapped: int, errors: int) -> int:
    """Run the program in new namespaces; return its exit code.

    This runs in the launcher's child, which becomes the process `outer` of the module's diagram.

    Args:
        spec: The specification of the program.
        root: An empty directory, for the program's file system.
        ready: Pipe to report that the namespaces exist.
        mapped: Pipe on which a byte arrives when the launcher has mapped the user IDs.
        errors: Pipe for the message if the setup fails.
    """
    try:
        _call("unshare", _CLONE)
        os.write(ready, b".")
        if not os.read(mapped, 1):
            return 1
        init = _fork()
        if init:
            for descriptor in (ready, mapped, errors):
                os.close(descriptor)
            return _wait_for(init)
        other = spec["other_user"]
        _make_root(root, spec["readable"], spec["disk_mib"])
        _write_files(Path("/", _HOME), spec["files"], _USER if other else None)
        if other:
            _become(_USER)
            prctl(PDEATHSIG, signal.SIGKILL)  # Set it again: the change of user has cleared it.
        program = os.fork()
        if program == 0:
            _exec(spec, f"/{_HOME}")
        os.closerange(3, 1 << 16)
        os._exit(_wait_for(program))
    except OSError as error:
        os.write(errors, str(error).encode())
        os._exit(1)


def _map_users(child: int) -> None:
    """Map user IDs in the user namespace of `child` to users of the machine.

    The sandboxed program runs as user `_USER` of the namespace. On the machine this is the
    launcher's own user. If the launcher is root, it is the user nobody instead, and the namespace's
    root is the machine's root, which builds the file system.
    """
    outside = os.geteuid()
    lines = f"{_USER} {outside} 1"
    if outside == 0:
        lines = f"0 0 1\n{_USER} {_NOBODY} 1"
    else:
        Path(f"/proc/{child}/setgroups").write_text("deny")
    Path(f"/proc/{child}/uid_map").write_text(lines)
    groups = lines if outside == 0 else f"{_USER} {os.getegid()} 1"
    Path(f"/proc/{child}/gid_map").write_text(groups)


# ---------------------------------------------------------------- the launcher itself


def _descendants(pid: int) -> list[int]:
    """Return the process IDs of all descendants of the process `pid`."""
    found, todo = [], [pid]
    while todo:
        with suppress(OSError):
            parent = todo.pop()
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                found += [int(child) for child in children]
                todo += [int(child) for child in children]
    return found


def _memory_mib(pids: list[int]) -> int:
    """Return the anonymous and shared memory of the processes in MiB, without mapped files."""
    kib = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    kib += int(line.split()[1])
    return kib >> 10


def _watch(child: int, spec: dict[str, Any], deadline: float) -> str:
    """Wait until the program ends or exceeds a limit; return the name of that limit, or empty.

    Args:
        child: The launcher's child; it ends when the program ends.
        spec: The specification with the limits of memory and processes.
        deadline: Time, by the monotonic clock, at which the time limit is exceeded.
    """
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    while not poll.poll(1000 * _WATCH_SECONDS):
        if time.monotonic() > deadline:
            return "seconds"
        running = _descendants(os.getpid())
        if _memory_mib(running) > spec["memory_mib"]:
            return "memory"
        # Up to three descendants are not processes of the program but of the sandbox, such as the
        # processes `outer` and `init`.
        if len(running) > spec["processes"] + 3:
            return "processes"
    return ""


def _end_all(child: int) -> None:
    """Kill the launcher's child and all other descendants, until none is left."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    while remaining := _descendants(os.getpid()):
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _terminated(*_: object) -> None:
    """Raise InterruptedError on SIGTERM, so that the launcher ends the program and cleans up."""
    raise InterruptedError("terminated")


def _start(spec: dict[str, Any], root: str) -> tuple[int, int]:
    """Start the program, with or without namespaces.

    Returns:
        The ID of the launcher's child, which ends when the program ends, and a pipe to read the
        message from if the setup failed before the program started.
    """
    problems, errors = os.pipe()
    if not spec["namespaces"]:
        other = _NOBODY if spec["other_user"] else None
        _write_files(Path(root), spec["files"], other)
        child = _fork()
        if child == 0:
            try:
                if other is not None:
                    _become(other)
                _exec(spec, root)
            except OSError as error:
                os.write(errors, str(error).encode())
                os._exit(1)
        os.close(errors)
        return child, problems
    started, ready = os.pipe()
    mapped, go = os.pipe()
    child = _fork()
    if child == 0:
        os.close(go)
        os._exit(_in_namespaces(spec, root, ready, mapped, errors))
    for descriptor in (ready, mapped, errors):
        os.close(descriptor)
    if os.read(started, 1):
        try:
            _map_users(child)
            os.write(go, b".")
        except OSError as error:
            _end_all(child)
            raise OSError(error.errno, f"user map: {error.strerror}") from error
    os.close(go)
    return child, problems


def main(spec_fd: int, report_fd: int) -> None:
    """Run the program that a JSON specification describes; write a JSON report of how it ended.

    Args:
        spec_fd: Descriptor to read the specification from.
        report_fd: Descriptor to write the report to: an object with `exit_code`, `exceeded` (the
            limit that the program exceeded) or `error` (the sandbox itself failed).
    """
    for descriptor in (spec_fd, report_fd):
        os.set_inheritable(descriptor, False)
    with os.fdopen(spec_fd) as stream:
        spec = json.load(stream)
    prctl(PDEATHSIG, signal.SIGKILL)
    prctl(SUBREAPER, 1)
    deadline = time.monotonic() + spec["seconds"]
    root = tempfile.mkdtemp(prefix="megatron-async-sandbox-")
    report: dict[str, Any] = {}
    child = 0
    try:
        child, problems = _start(spec, root)
        signal.signal(signal.SIGTERM, _terminated)
        cause = _watch(child, spec, deadline)
        report = {"exceeded": cause} if cause else {"exit_code": _wait_for(child)}
        _end_all(child)
        problem = os.read(problems, 1000).decode() if not cause else ""
        if problem:
            report = {"error": problem}
    except OSError as error:
        report = {"error": str(error)}
        if child:
            _end_all(child)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    with os.fdopen(report_fd, "w") as stream:
        json.dump(report, stream)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""The process between a scorer and a program that a response brought along.

Run by path with a bare interpreter (standard library only):

    launcher ─ fork ─ outer: new namespaces ─ fork ─ init: file system, limits ─ fork ─ program

Invariants
- The program runs with a clean environment, in a session and a directory of its own, with resource
  limits, and as another user where the launcher is root.
- With `namespaces` it sees no network, no process but its own, and of the file system only what is
  listed, read-only, and a directory in memory. Without, only the rest of this list holds.
- When the launcher ends, by whatever cause, nothing of the program is left (with `namespaces`; else
  the launcher ends what it finds, unless it is killed itself).
- The program holds no descriptor but its standard ones: the report is the launcher's alone.
- All memory that the program can get is counted: calls for what belongs to no process, and for
  namespaces in which it could mount more, are refused.
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
"""NEWNS, NEWIPC, NEWUTS, NEWUSER, NEWPID, NEWNET."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MS_KEPT = {1024: 1024, 2048: 2048, 4096: 1 << 21}  # statvfs's flag: mount's (noatime and so on)
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
"""Of each machine: its mark, `clone`, and the refused ones: memfd_create, memfd_secret, shmget,
msgget, semget, unshare, io_uring_setup."""
_CLONE3 = 435
_WATCH_SECONDS = 0.05
_HOME = "box"
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    _call("prctl", option, value, 0, 0, 0)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [text.encode() for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), data.encode() or None)


# ---------------------------------------------------------------- the file system that it sees


def _bind(source: str, root: str) -> None:
    """`source` under `root` at the same place, read-only, with what is mounted below it."""
    target = root + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(source, target, "", _MS_BIND | _MS_REC)
    below = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in below:
        if place == target or place.startswith(f"{target}/"):
            found = os.statvfs(place).f_flag
            flags = found & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
            flags |= sum(new for old, new in _MS_KEPT.items() if found & old)
            _mount("", place, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)


def _make_root(root: str, readable: list[str], disk_mib: int) -> None:
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    size = f"size={disk_mib}m,nr_inodes=16384,mode=755"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    for name in _LINKED:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            _bind(f"/{name}", root)
    wanted: list[str] = []
    for place in sorted({os.path.realpath(place) for place in (*_READ, *readable)}):
        if os.path.exists(place) and not any(place.startswith(f"{w}/") for w in wanted):
            wanted.append(place)
            _bind(place, root)
    for place in readable:  # a link to a directory that is there under its real name
        if os.path.realpath(place) != place and not os.path.lexists(root + place):
            os.makedirs(os.path.dirname(root + place), exist_ok=True)
            os.symlink(os.path.realpath(place), root + place)
    os.mkdir(f"{root}/dev")
    for name in _DEVICES:
        Path(f"{root}/dev/{name}").touch()
        _mount(f"/dev/{name}", f"{root}/dev/{name}", "", _MS_BIND)
    for name in ("tmp", "dev/shm"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", 0o1777)
    os.mkdir(f"{root}/proc")
    with suppress(OSError):  # a container that masks parts of /proc forbids a new one
        _mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _write_files(folder: Path, files: dict[str, str], owner: int | None) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    if owner is not None:
        for path in (folder, *folder.iterdir()):
            os.chown(path, owner, owner)


# ---------------------------------------------------------------- the program


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _tasks(spec: dict[str, Any]) -> int:
    """The limit of tasks. Where all of the user's are counted (no user of its own, an older kernel)
    there is none."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    own = spec["other_user"] or (spec["namespaces"] and release >= (5, 14))
    return spec["processes"] + 1 if own else resource.RLIM_INFINITY  # init is one of them


def _limit(spec: dict[str, Any]) -> None:
    memory = spec["memory_mib"] << 20
    disk = spec["disk_mib"] << 20
    for what, value in (  # data, not address space: a file that is mapped takes no memory
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_AS, resource.RLIM_INFINITY),  # not the scorer's
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
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def _refuse_calls() -> None:
    """Refuse the calls of `_CALLS`, and `clone` for a new user namespace. Raises OSError."""
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}")
    mark, clone, refused = _CALLS[machine]
    load, equal, least, bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse = (end, 0, 0, _REFUSE)
    steps = [(load, 0, 0, 4), (equal, 1, 0, mark), refuse, (load, 0, 0, 0)]
    steps += [(least, 0, 1, 1 << 30), refuse]  # another numbering of the same machine (x32)
    for number in refused:
        steps += [(equal, 0, 1, number), refuse]
    # No filter sees what clone3 is asked for; without it the C library takes clone.
    steps += [(equal, 0, 1, _CLONE3), (end, 0, 0, _NOT_THERE)]
    steps += [(equal, 0, 3, clone), (load, 0, 0, 16), (bits, 0, 1, _NEWUSER), refuse]
    steps.append((end, 0, 0, _ALLOW))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    _call("prctl", _SET_SECCOMP, _FILTER, ctypes.byref(_Filter(len(steps), code)), 0, 0)


def _exec(spec: dict[str, Any], home: str) -> None:
    """Become the program; never returns."""
    os.setsid()
    os.chdir(home)
    prctl(_NO_NEW_PRIVS, 1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    _limit(spec)
    if spec["apart"]:
        try:
            _refuse_calls()
        except OSError:
            if spec["namespaces"]:  # else what is missing is reported already
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
    """A child that ends with its parent; 0 in it."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() not in (parent, 0):  # 0: the parent is in another process namespace
            os._exit(1)
    return child


def _wait_for(child: int) -> int:
    """The exit code of `child`; every other child that ends meanwhile is reaped."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _in_namespaces(spec: dict[str, Any], root: str, ready: int, mapped: int, errors: int) -> int:
    """Run the program from new namespaces; the exit code is its own."""
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
            prctl(PDEATHSIG, signal.SIGKILL)  # a change of user clears it
        program = os.fork()
        if program == 0:
            _exec(spec, f"/{_HOME}")
        os.closerange(3, 1 << 16)
        os._exit(_wait_for(program))
    except OSError as error:
        os.write(errors, str(error).encode())
        os._exit(1)


def _map_users(child: int) -> None:
    """The launcher's user is the only one inside; where it is root, `_USER` is nobody."""
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
    """Memory that these processes have for themselves or share without a file."""
    kib = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    kib += int(line.split()[1])
    return kib >> 10


def _watch(child: int, spec: dict[str, Any], deadline: float) -> str:
    """Wait for the program's end; why it must be ended, else empty."""
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    while not poll.poll(1000 * _WATCH_SECONDS):
        if time.monotonic() > deadline:
            return "seconds"
        running = _descendants(os.getpid())
        if _memory_mib(running) > spec["memory_mib"]:
            return "memory"
        if len(running) > spec["processes"] + 3:  # what is between the launcher and the program
            return "processes"
    return ""


def _end_all(child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    while left := _descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _terminated(*_: object) -> None:
    raise InterruptedError("terminated")


def _start(spec: dict[str, Any], root: str) -> tuple[int, int]:
    """The child that the program ends with, and a pipe that holds what went wrong before it."""
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
    """Run the program that the specification describes; report its end as one JSON object."""
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

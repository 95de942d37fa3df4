"""Directories below /tmp that only this user reaches, for sockets and files that processes share.

    /tmp/megatron-async-UID/RANDOM/    mode 700; `lock` is held by whoever made it

Not below TMPDIR: the name of a socket must stay short, and file locks need a local disk.

Invariants
- What is left of one whose maker has died is removed when the next one is made.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from megatron_async.errors import UserError

_LARGE_FILES_VARIABLE: Final = "MEGATRON_ASYNC_LARGE_FILES"
_UNLOCKED_SECONDS: Final = 60.0
# Caches of compiled kernels, which later processes of this user reuse. Triton's default is in the
# home directory: on a network file system, ranks that write there together crash now and then.
# SGLang puts those of FlashInfer, DeepGEMM, TileLang and CUDA below its own directory.
_COMPILED: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "SGLANG_CACHE_DIR": "sglang",
}


def temporary_files(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a child process that leaves temporary files and sockets behind.

    They go to `directory`, which is removed with the child. Large files go where the user wants
    temporary files (`large_files_directory`). Compiled kernels go to a directory on this node that
    stays, `/tmp/megatron-async-compiled-UID`. `environment` is the child's whole environment; the
    directories for compiled kernels that it names are kept.
    """
    compiled = user_directory("megatron-async-compiled")
    caches = {
        variable: environment.get(variable) or str(compiled / name)
        for variable, name in _COMPILED.items()
    }
    return {
        "TMPDIR": str(directory),
        _LARGE_FILES_VARIABLE: tempfile.gettempdir(),
        **caches,
    }


def large_files_directory() -> Path:
    """Return the directory for large temporary files of this process."""
    return Path(os.environ.get(_LARGE_FILES_VARIABLE) or tempfile.gettempdir())


@contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory, removed after the block."""
    parent = user_directory("megatron-async")
    for earlier in parent.iterdir():
        _remove_if_left(earlier)
    directory = parent / secrets.token_hex(4)
    directory.mkdir(mode=0o700)
    lock = os.open(directory / "new", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (directory / "new").rename(directory / "lock")  # held before anybody finds it
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def user_directory(name: str) -> Path:
    """`/tmp/NAME-UID`, which only this user reaches. Raises UserError when another one has it."""
    path = Path(f"/tmp/{name}-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(
            f"{path} is not a directory of this user, and sockets, logs and compiled kernels are "
            "kept there. Remove it, or ask its owner to remove it"
        )
    path.chmod(0o700)
    return path


def process_directory(prefix: str, where: Path) -> Path:
    """Create a directory in `where` whose name holds this process's id; return its path.

    Directories with this prefix are removed if their processes no longer exist.
    """
    where.mkdir(parents=True, exist_ok=True)
    for left in where.glob(prefix + "*"):
        owner = left.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with suppress(OSError):  # another user's, or another process removes it just now
                shutil.rmtree(left)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=where))


def _remove_if_left(directory: Path) -> None:
    """Remove a directory whose creator has died.

    A directory without a lock file is removed only if it is old and empty: a new one is not locked
    yet, and one with files may belong to a live process whose lock file was deleted.
    """
    try:
        lock = os.open(directory / "lock", os.O_RDWR)
    except OSError:
        with suppress(OSError):  # `rmdir` refuses a directory with other files
            if time.time() - directory.lstat().st_mtime > _UNLOCKED_SECONDS:
                (directory / "new").unlink(missing_ok=True)
                directory.rmdir()
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)

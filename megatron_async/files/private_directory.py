"""Creates directories below /tmp that only the current user can access, for sockets and files.

    /tmp/megatron-async-UID/RANDOM/    mode 700; its creator holds the lock on the file `lock`

The directories are not below TMPDIR, which may be a long path on a shared disk: the path of a
socket must be short, and file locks need a local disk.

Invariants
- A directory whose creator has died is removed when any process of this user creates the next one.
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
# home directory; if that is on a network file system, ranks that write there together sometimes
# crash. SGLang puts the caches of FlashInfer, DeepGEMM, TileLang and CUDA below its own directory.
_COMPILED: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "SGLANG_CACHE_DIR": "sglang",
}


def temporary_files(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that direct a child process's temporary files and caches.

    Temporary files and sockets go to `directory`, which is removed with the child. Large files go
    where the user wants temporary files (`large_files_directory`). Compiled kernels go to the
    directory `/tmp/megatron-async-compiled-UID` on this node, which stays.

    Args:
        directory: Directory for temporary files and sockets.
        environment: The child's whole environment. Directories for compiled kernels that it already
            names are kept.
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
    """Return the directory for large temporary files, which the user chooses with TMPDIR.

    In a child process whose TMPDIR `temporary_files` has replaced, this is still the user's choice.
    """
    return Path(os.environ.get(_LARGE_FILES_VARIABLE) or tempfile.gettempdir())


@contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a new directory that only this user can access; remove it after the block.

    Directories whose creators have died are removed first.
    """
    parent = user_directory("megatron-async")
    for earlier in parent.iterdir():
        _remove_if_left(earlier)
    directory = parent / secrets.token_hex(4)
    directory.mkdir(mode=0o700)
    lock = os.open(directory / "new", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Give the file its final name after locking it, so that other processes never find it
        # unlocked while the directory is in use.
        (directory / "new").rename(directory / "lock")
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def user_directory(name: str) -> Path:
    """Create the directory `/tmp/NAME-UID`, which only this user can access; return its path.

    If the directory exists, only its access mode is set.

    Raises:
        UserError: If the path belongs to another user or is not a directory.
    """
    path = Path(f"/tmp/{name}-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(
            f"{path} is not a directory of this user; sockets, logs and compiled kernels are kept "
            "there. Remove it, or ask its owner to remove it."
        )
    path.chmod(0o700)
    return path


def process_directory(prefix: str, where: Path) -> Path:
    """Create a directory in `where` whose name contains this process's ID; return its path.

    Directories with this prefix are removed if their processes no longer exist.
    """
    where.mkdir(parents=True, exist_ok=True)
    for found in where.glob(prefix + "*"):
        owner = found.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            # Ignore errors: the directory may belong to another user, or another process may be
            # removing it at the same time.
            with suppress(OSError):
                shutil.rmtree(found)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=where))


def _remove_if_left(directory: Path) -> None:
    """Remove a directory of `private_directory` if the process that created it has died.

    A directory without a lock file is removed only if it is old and empty: a new one is not locked
    yet, and one with files may belong to a running process whose lock file was deleted.
    """
    try:
        lock = os.open(directory / "lock", os.O_RDWR)
    except OSError:
        with suppress(OSError):  # `rmdir` raises an error if the directory has other files.
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

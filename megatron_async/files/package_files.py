"""Finds the launch scripts and example configurations that come with the package.

In a clone these are `launch/` and `configs/` of the repository. A wheel has a copy of both in
`megatron_async/_shipped` (setup.py), so that an installed package works from any directory.
"""

import hashlib
import os
import socket
import sys
from pathlib import Path
from typing import Final

from megatron_async.errors import UserError

# Launch scripts of a clone set this environment variable to the digest (`code_digest`) of the
# package in the clone; launch/cluster_env.sh computes it.
CODE_VARIABLE: Final = "MEGATRON_ASYNC_CODE"
CONTAINER_OPTION: Final = "--container-image"
_PACKAGE: Final = Path(__file__).parents[1]
_IN_WHEEL: Final = _PACKAGE / "_shipped"
ROOT: Final = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent


def existing(path: Path) -> Path:
    """Return `path` if it exists, else the package's own file with the same relative path.

    For example, `configs/quickstart.yaml` is found from any directory, because it comes with the
    package. If the package has no such file either, `path` is returned.
    """
    shipped = ROOT / path
    return shipped if not path.exists() and shipped.is_file() else path


def script_environment() -> dict[str, str]:
    """Return environment variables that launch scripts need in an installed package.

    The result is empty in a clone of the repository, where the scripts' defaults are right. It is
    also empty if `MEGATRON_ASYNC_VENV` is set already, or if the scripts start containers.
    """
    in_container = CONTAINER_OPTION in os.environ.get("MEGATRON_ASYNC_SRUN_ARGS", "")
    if ROOT is not _IN_WHEEL or "MEGATRON_ASYNC_VENV" in os.environ or in_container:
        return {}
    return {"MEGATRON_ASYNC_VENV": sys.prefix}


def code_digest() -> str:
    """Return a digest of all Python files of the package, to detect that two copies differ.

    It is the SHA-256 of a list with the SHA-256 and the path of each file. In a clone of the
    repository, `launch/cluster_env.sh` computes the same digest with the command `sha256sum`.
    """
    files = sorted(_PACKAGE.rglob("*.py"), key=lambda file: os.fsencode(file))
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  "
        f"{file.relative_to(_PACKAGE.parent).as_posix()}\n"
        for file in files
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_code() -> None:
    """Raise a UserError if the launch script comes with other code than this process runs.

    This happens, for example, if the container image of this process has an older package.
    """
    wanted = os.environ.get(CODE_VARIABLE)
    if wanted and wanted != code_digest():
        raise UserError(
            f"the code in {_PACKAGE} on {socket.gethostname()} differs from the code of the launch "
            f"script. Rebuild the image, or mount the repository over it "
            f"(--container-mounts=REPOSITORY:{_PACKAGE.parent})."
        )

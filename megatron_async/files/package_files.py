"""Files that come with the package and are no Python: launch scripts, example configurations.

In a clone they are `launch/` and `configs/` of the repository. A wheel carries a copy of both in
`megatron_async/_shipped` (setup.py), so that an installed package works from any directory.
"""

import hashlib
import os
import socket
import sys
from pathlib import Path
from typing import Final

from megatron_async.errors import UserError

# Where launch scripts leave the digest of the code that they belong to (launch/cluster_env.sh).
CODE_VARIABLE: Final = "MEGATRON_ASYNC_CODE"
CONTAINER_OPTION: Final = "--container-image"
_PACKAGE: Final = Path(__file__).parents[1]
_IN_WHEEL: Final = _PACKAGE / "_shipped"
ROOT: Final = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent


def existing(path: Path) -> Path:
    """`path`, or the shipped file of that name if there is none: `configs/quickstart.yaml`."""
    shipped = ROOT / path
    return shipped if not path.exists() and shipped.is_file() else path


def script_environment() -> dict[str, str]:
    """Variables that shipped scripts need beside their defaults, which are those of a clone."""
    in_container = CONTAINER_OPTION in os.environ.get("MEGATRON_ASYNC_SRUN_ARGS", "")
    if ROOT is not _IN_WHEEL or "MEGATRON_ASYNC_VENV" in os.environ or in_container:
        return {}
    return {"MEGATRON_ASYNC_VENV": sys.prefix}


def code_digest() -> str:
    """A digest of every module of the package, as `sha256sum` of a clone gives it."""
    files = sorted(_PACKAGE.rglob("*.py"), key=lambda file: os.fsencode(file))
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  "
        f"{file.relative_to(_PACKAGE.parent).as_posix()}\n"
        for file in files
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_code() -> None:
    """Check that a launch script runs its own code, and not an older image's. Raises UserError."""
    wanted = os.environ.get(CODE_VARIABLE)
    if wanted and wanted != code_digest():
        raise UserError(
            f"the code in {_PACKAGE} on {socket.gethostname()} is not that of the launch script: "
            f"build the image anew, or mount the repository over it "
            f"(--container-mounts=REPOSITORY:{_PACKAGE.parent})"
        )

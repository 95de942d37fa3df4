"""Prints the variables that SGLang's own `_set_envs_and_config` leaves, on stub arguments.

    python -m tests.engines.sglang_environment SETTING...

Each SETTING is one that is on; the environment is this process's own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

from megatron_async.engines.sglang.cpu import install_stand_ins


class Arguments:
    """One server on one node; whatever is not named is off."""

    nnodes = 1
    dcp_size = 1

    def __init__(self, *on: str) -> None:
        self._on = on

    def __getattr__(self, name: str) -> Any:
        return name in self._on


def main() -> None:
    install_stand_ins()
    from sglang.srt.entrypoints import engine

    os.environ["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"
    with mock.patch.object(engine, "resolving_view", lambda arguments: arguments):
        engine._set_envs_and_config(Arguments(*sys.argv[1:]))
    print(json.dumps(dict(os.environ)))


if __name__ == "__main__":
    main()

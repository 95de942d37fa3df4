"""Prints the environment variables that SGLang's own `_set_envs_and_config` leaves, for stub
arguments.

Each line of the standard input is a JSON object with `environment` and `settings`, the settings
that are on. Each reply comes from a forked process, so that SGLang's imports, which take ten
seconds, are done only once.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any
from unittest import mock

from megatron_async.engines.sglang.cpu import install_stand_ins


class Arguments:
    """Arguments of one server on one node; every setting is off except those in `on`."""

    nnodes = 1
    dcp_size = 1

    def __init__(self, *on: str) -> None:
        self._on = on

    def __getattr__(self, name: str) -> Any:
        return name in self._on


def environment_after(environment: dict[str, str], settings: list[str]) -> dict[str, str]:
    """Return the environment after SGLang's function; replaces the environment of this process."""
    from sglang.srt.entrypoints import engine

    os.environ.clear()
    os.environ.update(environment, SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1")
    with mock.patch.object(engine, "resolving_view", lambda arguments: arguments):
        engine._set_envs_and_config(Arguments(*settings))
    return dict(os.environ)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang's imports print to the standard output.
    install_stand_ins()
    importlib.import_module("sglang.srt.entrypoints.engine")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            print(json.dumps(environment_after(**json.loads(line))), file=answers, flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit("SGLang's function failed; the traceback is above")


if __name__ == "__main__":
    main()

"""Answers with the variables that SGLang's own `_set_envs_and_config` leaves, on stub arguments.

Each line of the standard input is a JSON object: `environment`, and the `settings` that are on. The
imports, ten seconds, are made once; each answer comes from a fork.
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
    """One server on one node; whatever is not named is off."""

    nnodes = 1
    dcp_size = 1

    def __init__(self, *on: str) -> None:
        self._on = on

    def __getattr__(self, name: str) -> Any:
        return name in self._on


def left(environment: dict[str, str], settings: list[str]) -> dict[str, str]:
    """The environment after SGLang's function, in a process that has this one."""
    from sglang.srt.entrypoints import engine

    os.environ.clear()
    os.environ.update(environment, SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1")
    with mock.patch.object(engine, "resolving_view", lambda arguments: arguments):
        engine._set_envs_and_config(Arguments(*settings))
    return dict(os.environ)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang's imports print
    install_stand_ins()
    importlib.import_module("sglang.srt.entrypoints.engine")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            print(json.dumps(left(**json.loads(line))), file=answers, flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit("it failed, and this is after its traceback")


if __name__ == "__main__":
    main()

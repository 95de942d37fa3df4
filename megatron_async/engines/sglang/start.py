"""Hooks of SGLang's registry, for its HTTP process, that make a server start sooner.

- Without a tokenizer nothing is turned into text, yet SGLang starts a process for it.
- A scheduler process is spawned, and imports all of SGLang once more. On CPU it is forked from the
  HTTP process instead, which has imported everything and runs nothing yet. (CUDA forbids that.)
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_DETOKENIZERS = f"{_ENGINE}._launch_detokenizer_subprocesses"
_SCHEDULERS = f"{_ENGINE}._launch_scheduler_processes"


def no_detokenizer(
    original: Callable[..., tuple[list[Any], list[str]]], engine: Any, *args: Any, **asked: Any
) -> tuple[list[Any], list[str]]:
    """Around the start of detokenizers: token ids reach the HTTP server without them."""
    if asked["server_args"].skip_tokenizer_init:
        return [], []
    return original(engine, *args, **asked)


def forked(original: Callable[..., Any], engine: Any, *args: Any, **asked: Any) -> Any:
    """Around the start of schedulers on CPU."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        return original(engine, *args, **asked)
    finally:
        multiprocessing.set_start_method(before, force=True)


def register(on_cpu: bool) -> None:
    """Register the hooks, before the server of this process starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_DETOKENIZERS, no_detokenizer, HookType.AROUND)
    if on_cpu:
        HookRegistry.register(_SCHEDULERS, forked, HookType.AROUND)
    HookRegistry.apply_hooks()
    for target in (_DETOKENIZERS, *([_SCHEDULERS] if on_cpu else [])):
        if target not in HookRegistry._patched:
            raise RuntimeError(f"SGLang has no {target}: engines would start more slowly")

"""Hooks of SGLang's registry: how they are put in, and those of its HTTP process.

- A request that arrives while its engine is paused, or locked for an update, waits in the HTTP
  process. SGLang drops an abort of it, but records that one was sent and ignores every repetition,
  so that the request runs on to its last token later. Without that record a repetition works.
- Without a tokenizer nothing is turned into text, yet SGLang starts a process for it.
- A scheduler process is spawned, and imports all of SGLang once more. On CPU it is forked from the
  HTTP process instead, which has imported everything and runs nothing yet. (CUDA forbids that.)
  What is imported is out of the reach of garbage collection before, so that SGLang need not ask
  itself for that later: without a warm-up it asks before it listens.
"""

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

# The function of SGLang, the hook, BEFORE, AFTER or AROUND, and what is amiss without it.
Hook = tuple[str, Callable[..., Any], str, str]

_ABORT = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_DETOKENIZERS = f"{_ENGINE}._launch_detokenizer_subprocesses"
_SCHEDULERS = f"{_ENGINE}._launch_scheduler_processes"
_FREEZE = "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup"


def register_hooks(hooks: Sequence[Hook]) -> None:
    """Register hooks in this process. Raises RuntimeError for a function that SGLang lacks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind, _ in hooks:
        HookRegistry.register(target, hook, HookType[kind])
    HookRegistry.apply_hooks()
    for target, _, _, without in hooks:
        if target not in HookRegistry._patched:
            raise RuntimeError(f"SGLang has no {target}: {without}")


def forget_earlier_abort(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Forget, before an abort, that one was sent, so that it is sent again."""
    state = manager.rid_to_state.get(rid)
    if state is not None:
        state.abort_sent = False


def no_detokenizer(
    original: Callable[..., tuple[list[Any], list[str]]], engine: Any, *args: Any, **asked: Any
) -> tuple[list[Any], list[str]]:
    """Around the start of detokenizers: token ids reach the HTTP server without them."""
    if asked["server_args"].skip_tokenizer_init:
        return [], []
    return original(engine, *args, **asked)


def forked(original: Callable[..., Any], engine: Any, *args: Any, **asked: Any) -> Any:
    """Around the start of schedulers on CPU."""
    gc.freeze()  # a search in the new process would copy the pages that it shares
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        return original(engine, *args, **asked)
    finally:
        multiprocessing.set_start_method(before, force=True)


def frozen_already(_original: Callable[..., None], _server_args: Any) -> None:
    """Around the request to freeze, on CPU."""


def register(on_cpu: bool) -> None:
    """Put the hooks of the HTTP process in, before its server starts."""
    slow = "engines would start more slowly"
    hooks: list[Hook] = [
        (_ABORT, forget_earlier_abort, "BEFORE", "aborts would be lost"),
        (_DETOKENIZERS, no_detokenizer, "AROUND", slow),
    ]
    if on_cpu:
        hooks.append((_SCHEDULERS, forked, "AROUND", slow))
        hooks.append((_FREEZE, frozen_already, "AROUND", "each start would log an error"))
    register_hooks(hooks)

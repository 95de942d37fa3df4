"""Registers hooks in SGLang's registry, and provides the hooks of its HTTP process.

- Repeatable aborts: a request that arrives while its engine is paused, or locked for an update,
  waits in the HTTP process. SGLang loses an abort of such a request, but records that an abort was
  sent and ignores further aborts. The request would then run to its last token when the engine
  continues. The hook deletes the record, so that a repeated abort works.
- No detokenizer: SGLang starts a process that converts tokens to text, even if it has no tokenizer
  and so never uses the process. The hook does not start it.
- Forked schedulers: SGLang spawns its scheduler processes, each of which imports all of SGLang
  again. On CPU the hook forks them from the HTTP process instead, which has imported everything and
  runs nothing yet. (CUDA forbids that.) Objects that exist before the fork are
  excluded from garbage collection. SGLang would request that later itself by a call to its own
  server, which without a warm-up comes before the server listens and logs an error; another hook
  suppresses it.
"""

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

# A hook: name of SGLang's function, the function to be called, when it is called (BEFORE, AFTER or
# AROUND SGLang's function), and the problem if the hook is missing, for error messages.
Hook = tuple[str, Callable[..., Any], str, str]

_ABORT = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_DETOKENIZERS = f"{_ENGINE}._launch_detokenizer_subprocesses"
_SCHEDULERS = f"{_ENGINE}._launch_scheduler_processes"
_FREEZE = "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup"


def register_hooks(hooks: Sequence[Hook]) -> None:
    """Register hooks in SGLang's registry in this process, so that SGLang calls them before, after
    or around its own functions.

    Raises:
        RuntimeError: If SGLang lacks one of the functions to be hooked.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind, _ in hooks:
        HookRegistry.register(target, hook, HookType[kind])
    HookRegistry.apply_hooks()
    for target, _, _, without in hooks:
        if target not in HookRegistry._patched:
            raise RuntimeError(f"SGLang has no {target}: {without}")


def forget_earlier_abort(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Hook before SGLang aborts request `rid`: delete SGLang's record that an abort of this
    request was sent before. With this record, SGLang would not send the new abort to its scheduler.
    """
    state = manager.rid_to_state.get(rid)
    if state is not None:
        state.abort_sent = False


def no_detokenizer(
    original: Callable[..., tuple[list[Any], list[str]]], engine: Any, *args: Any, **asked: Any
) -> tuple[list[Any], list[str]]:
    """Hook around the start of detokenizers: start none if the tokenizer is off.

    Token ids reach the HTTP server without detokenizers.
    """
    if asked["server_args"].skip_tokenizer_init:
        return [], []
    return original(engine, *args, **asked)


def forked(original: Callable[..., Any], engine: Any, *args: Any, **asked: Any) -> Any:
    """Hook around the start of schedulers on CPU: fork them instead of spawning them."""
    # Exempt existing objects from garbage collection. The new process shares their memory pages
    # with this process. A collection would write to each page, and the system would then copy it.
    gc.freeze()
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        return original(engine, *args, **asked)
    finally:
        multiprocessing.set_start_method(before, force=True)


def frozen_already(_original: Callable[..., None], _server_args: Any) -> None:
    """Hook around SGLang's request to exempt objects from garbage collection, on CPU: do nothing,
    because `forked` has done that."""


def register(on_cpu: bool) -> None:
    """Register the hooks of the HTTP process; call this before its server starts."""
    slow = "engines would start more slowly"
    hooks: list[Hook] = [
        (_ABORT, forget_earlier_abort, "BEFORE", "aborts would be lost"),
        (_DETOKENIZERS, no_detokenizer, "AROUND", slow),
    ]
    if on_cpu:
        hooks.append((_SCHEDULERS, forked, "AROUND", slow))
        hooks.append((_FREEZE, frozen_already, "AROUND", "each start would log an error"))
    register_hooks(hooks)

"""Aborts that can be repeated: a hook of SGLang's registry, for its HTTP process.

A request that arrives while its engine is paused, or locked for an update, waits in the HTTP
process. SGLang drops an abort of it, but records that one was sent and ignores every repetition, so
that the request runs on to its last token later. Without that record a repetition takes effect.
"""

from __future__ import annotations

from typing import Any

_ABORT = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"


def forget_earlier_abort(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Forget, before an abort, that one was sent, so that it is sent again."""
    state = manager.rid_to_state.get(rid)
    if state is not None:
        state.abort_sent = False


def register() -> None:
    """Register the hook, before the server of this process starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_ABORT, forget_earlier_abort, HookType.BEFORE)
    HookRegistry.apply_hooks()
    if _ABORT not in HookRegistry._patched:
        raise RuntimeError(f"SGLang has no {_ABORT}: aborts would be lost")

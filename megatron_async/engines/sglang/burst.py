"""Passes requests that were sent together to SGLang's scheduler in few messages.

After a step boundary, hundreds of requests are sent at once, and the HTTP server needs one or more
milliseconds for each. SGLang's scheduler would start a prefill pass for the few requests that have
arrived, and then another one. The hook here collects such requests in the HTTP process and passes
them to the scheduler together.

Invariants
- Collected requests are passed on as soon as all requests that were sent together have arrived, or
  their tokens fill a prefill pass, or no further one has arrived for `_QUIET_SECONDS`.
- Requests reach the scheduler in the order in which they arrived, and before any later message of
  another kind, for instance an abort. Only urgent requests (queue.py) do not wait.
- All schedulers of a tensor-parallel engine get the same messages, so they make the same decisions.
"""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

DISPATCH = "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler"
_QUIET_SECONDS = 0.05


def priority_of(together: int) -> int:
    """Return the value of a request's field `priority` if `together` requests are sent at once.

    SGLang itself ignores this field without --enable-priority-scheduling.
    """
    return -together


class Collector:
    """Collects requests that were sent together; belongs to the HTTP process of one engine."""

    def __init__(self) -> None:
        self._collected: list[Any] = []
        self._missing = 0
        self._tokens = 0
        self._timer: asyncio.TimerHandle | None = None

    def dispatch(self, original: Callable[[Any, Any], None], manager: Any, message: Any) -> None:
        """Hook around the dispatch of a message to the scheduler."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

        if not isinstance(message, TokenizedGenerateReqInput):
            self._pass_on(original, manager)
            original(manager, message)
            return
        together = -(message.priority or 0)
        if together < 0 or (together <= 1 and not self._collected):
            original(manager, message)
            return
        if together > 1:
            self._missing = (self._missing or together) - 1
        # SGLang changes the object after this call, so keep it as it is now.
        self._collected.append(copy.copy(message))
        self._tokens += len(message.input_ids)
        if self._timer is not None:
            self._timer.cancel()
        if not self._missing or self._tokens >= _tokens_of_a_pass():
            self._pass_on(original, manager)
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_QUIET_SECONDS, self._give_up, original, manager)

    def _give_up(self, original: Callable[[Any, Any], None], manager: Any) -> None:
        """Pass on the collected requests, and wait for no further one that was sent with them."""
        self._missing = 0
        self._pass_on(original, manager)

    def _pass_on(self, original: Callable[[Any, Any], None], manager: Any) -> None:
        """Pass all collected requests to the scheduler in one message."""
        collected, self._collected, self._tokens = self._collected, [], 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(collected) == 1:
            original(manager, collected[0])
        elif collected:
            original(manager, manager.batch_tokenized_generate_req_type(batch=collected))


def _tokens_of_a_pass() -> int:
    """Return the largest number of tokens of a prefill pass of this engine."""
    from sglang.srt.runtime_context import get_schedule

    settings = get_schedule()
    sizes = (settings.max_prefill_tokens, settings.chunked_prefill_size)
    return min(size for size in sizes if size is not None and size > 0)

"""The child that judges: one JSON request a line on stdin, one JSON reply a line on stdout.

Invariants
- It imports neither torch nor transformers.
- Nothing but replies goes to the reply pipe: what verifier code prints is thrown away once the
  process is ready, and goes to stderr before.
- It outlives no parent: it ends when stdin closes, and the kernel's alarm ends it when a judgement
  runs past `limit` and nobody is left to kill it (a Python thread could not: a hanging big-integer
  operation never lets it run).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, TextIO

from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.build import build_scorer

MEMORY_LIMIT_BYTES = 4 << 30
_ALARM_SLACK_SECONDS = 5.0


def serve(config: TaskConfig, requests: TextIO, replies: TextIO) -> None:
    """Judge until `requests` ends. The first reply is `{"ready": true}`."""
    scorer = build_scorer(config)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    limit = config.verifier_timeout_seconds + _ALARM_SLACK_SECONDS
    _reply(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            judgement = scorer.score(request["payload"], request["text"])
            reply: dict[str, Any] = {"reward": judgement.reward, "detail": judgement.detail}
        except Exception as error:  # noqa: BLE001 - third-party verifiers raise anything
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, reply)


def _reply(replies: TextIO, content: dict[str, Any]) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()


def main(config_json: str) -> int:
    """Exit code: 0, or 2 when the settings are refused (the reply names why)."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides at Ctrl-C
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(TaskConfig.model_validate_json(config_json), sys.stdin, replies)
    except UserError as error:
        _reply(replies, {"user_error": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

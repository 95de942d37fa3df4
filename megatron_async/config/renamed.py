"""Settings under their former names: read as those of today, with a notice.

Invariants
- Files are renamed before they are merged, so a setting of the command line or of a file over a
  `base:` takes the place of one below it, whichever name either has. One file with both is refused.
- A run that goes on keeps today's names: only what is read has others.
"""

import copy
import logging
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from megatron_async.errors import UserError

RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "task.verifier_timeout_seconds": "scorer_timeout_seconds",
        "task.on_verifier_timeout": "on_scorer_timeout",
        "task.verifier_workers": "scorer_workers",
        "simulate.reward.verifier_seconds": "scorer_seconds",
    }
)
"""Former dotted names, and what the setting is called in its section today."""

_logger = logging.getLogger(__name__)


def with_todays_names(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`settings`, which are those of `where`. Raises UserError for both names of one."""
    result = copy.deepcopy(dict(settings))
    for name, new in RENAMED.items():
        *sections, old = name.split(".")
        inner: Any = result
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or old not in inner:
            continue
        today = ".".join([*sections, new])
        if new in inner:
            raise UserError(f"{where}: {name} and {today} are both set: {name} is its former name")
        inner[new] = inner.pop(old)
        _notice(f"note: {where}: {name} is called {today}; the old name still works")
    return result


@cache  # a resume reads a run's settings more than once
def _notice(sentence: str) -> None:
    _logger.warning(sentence)

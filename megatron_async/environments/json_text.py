"""JSON for a model to read: text is written as it is, not as escapes.

A model has learned names and words in their own letters. It reads `\\u6771` as ten or more tokens,
and learns to write such escapes itself.
"""

import json
from collections.abc import Callable
from typing import Any


def json_text(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return `value` as JSON with literal text.

    Half of a surrogate pair stays an escape, so that the JSON can be encoded and means the same.

    Args:
        value: What to write.
        default: Returns a value of JSON for an object that is none; without it TypeError is raised.
    """
    text = json.dumps(value, ensure_ascii=False, default=default)
    return text.encode(errors="backslashreplace").decode()

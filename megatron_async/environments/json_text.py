"""Writes JSON for a model to read, with non-ASCII text as it is rather than as `\\u` escapes.

A model has learned names and words in their own letters. It reads the escape `\\u6771` as ten or
more tokens, and a model that is trained on such escapes learns to write them.
"""

import json
from collections.abc import Callable
from typing import Any


def json_text(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return `value` as JSON text in which non-ASCII characters are written literally.

    A lone surrogate (half of a surrogate pair) stays an escape, so that the JSON can be encoded as
    UTF-8 without a change of meaning.

    Args:
        value: Object to write.
        default: Converts an object that JSON cannot represent to one that it can. Without
            `default`, such an object raises TypeError.
    """
    text = json.dumps(value, ensure_ascii=False, default=default)
    return text.encode(errors="backslashreplace").decode()

"""Detects token ids and log-probs that no policy can produce, to keep them out of training.

The log-prob of a sampled token is at most 0, apart from rounding. It is at least -103.3, the
logarithm of 2^-149, which is the smallest positive float32 probability.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

MAX_LOGPROB: Final = 1e-3
SMALLEST_LOGPROB: Final = -104.0


def find_invalid_token(
    token_ids_T: npt.NDArray[Any], logprobs_T: npt.NDArray[Any], vocabulary: int | None
) -> str | None:
    """Describe a token that no policy can produce; return None if all tokens are valid.

    Args:
        token_ids_T: The token ids.
        logprobs_T: The log-prob of each token.
        vocabulary: Number of tokens in the model's embedding; None if it is not known.
    """
    if not len(token_ids_T):
        return None
    lowest, highest = int(token_ids_T.min()), int(token_ids_T.max())
    if lowest < 0 or (vocabulary is not None and highest >= vocabulary):
        wrong = lowest if lowest < 0 else highest
        return f"token {wrong} is outside the vocabulary of {vocabulary} tokens"
    # Comparisons with NaN are false. So test whether all values are valid, and not whether one is
    # invalid, which would miss NaN.
    if not (logprobs_T.max() <= MAX_LOGPROB and logprobs_T.min() >= SMALLEST_LOGPROB):
        possible_T = (logprobs_T <= MAX_LOGPROB) & (logprobs_T >= SMALLEST_LOGPROB)
        place = int(np.argmin(possible_T))
        return f"token {int(token_ids_T[place])} has log-prob {float(logprobs_T[place]):g}"
    return None

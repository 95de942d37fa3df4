"""Lets the senders of a trainer's pipeline stages send to the engines one after the other.

The leader of each stage (its first rank) gathers and sends the layers of its stage over its own
connection. Engines process requests in the order of arrival, and that order must be the same on all
engines: if two groups entered broadcasts in different orders, they would wait for each other
forever. Therefore a token passes from stage to stage. Gathering a first bucket, and writing files,
need no token.

Invariants
- The previous stage passes its token on exactly once for each `take`, also after it has failed.
- A stage after a failed one sends nothing: its `take` raises `EarlierStageFailed`.

`publisher.py` implements the order of a real trainer. A single sender needs none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_async.errors import ComponentFailure

# Number of a trainer's senders that send at the same time; the simulator assumes the same number.
SENDERS_AT_ONCE: Final = 1


class EarlierStageFailed(ComponentFailure):
    """Raised in a pipeline stage if an earlier stage has failed to send its weights.

    The leader of the stage that failed first reports the reason.
    """


@dataclass(frozen=True)
class StageToken:
    """What the previous stages have done in an update.

    Attributes:
        names: Names of the tensors that they have sent.
        written: Manifest entries of the files that they have written; empty for transports without
            files.
        failed: Whether one of them has failed.
    """

    names: frozenset[str] = frozenset()
    written: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False


class StageOrder:
    """The position of one sender in the order in which the senders of the pipeline stages send;
    this class is for a single sender, which waits for no other."""

    index = 0
    last = True

    def take(self) -> StageToken:
        """Wait for the token of the previous stage, and return it.

        Raises:
            EarlierStageFailed: If an earlier stage has failed.
        """
        return StageToken()

    def hand_on(self, token: StageToken) -> None:
        """Pass the token to the next stage; does nothing in the last stage."""

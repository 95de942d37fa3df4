"""Makes the senders of a trainer's pipeline stages send weights to the engines one after the other.

The leader of each stage (its first rank) gathers and sends the layers of its stage over its own
connection. Engines process requests in the order of arrival, and that order must be the same on all
engines: if two groups entered broadcasts in different orders, they would wait for each other
forever. Therefore a token is passed from stage to stage, and a stage sends only while it has the
token. It can gather its first bucket (tensors that are sent together) or write files without the
token.

Invariants
- For each `take` of a stage, the previous stage passes the token on exactly once, even if it has
  failed.
- A stage after a failed one sends nothing: its `take` raises `EarlierStageFailed`.

`StageOrder` here is for a single sender, which waits for nothing. `publisher.StageLeaders`
implements the order of several stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_async.errors import ComponentFailure

# Number of a trainer's senders that send at the same time. The simulator of runs (`simulate`)
# assumes this number too.
SENDERS_AT_ONCE: Final = 1


class EarlierStageFailed(ComponentFailure):
    """Error in a pipeline stage that sends nothing because an earlier stage has failed to send its
    weights.

    The reason is in the error of the stage that failed first.
    """


@dataclass(frozen=True)
class StageToken:
    """Report about the tensors and files that a pipeline stage and all stages before it have sent
    in an update; the stage passes it on to the next stage.

    Attributes:
        names: Names of the tensors that these stages have sent.
        written: Manifest entries of the files that these stages have written; empty for transports
            without files.
        failed: Whether one of these stages has failed.
    """

    names: frozenset[str] = frozenset()
    written: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False


class StageOrder:
    """Position of a sender in the order in which the senders of pipeline stages send. This class is
    the order for a single sender, which waits for nothing; subclasses are for several senders.

    `index` is the sender's position, counted from 0, and `last` is whether it is the last sender.
    """

    index = 0
    last = True

    def take(self) -> StageToken:
        """Wait until the previous stage has sent and passes its token on; return the token, which
        lists the tensors and files that all earlier stages have sent.

        Raises:
            EarlierStageFailed: If an earlier stage has failed.
        """
        return StageToken()

    def hand_on(self, token: StageToken) -> None:
        """Pass `token` to the next stage, so that it may send; does nothing in the last stage."""

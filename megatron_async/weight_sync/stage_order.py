"""StageOrder: the senders of a trainer's pipeline stages talk to the engines one after the other.

Each stage's leader gathers and sends its own layers over its own connection. Engines take what
they are asked in the order of arrival, and that order must be the same on all of them: two groups
whose broadcasts they entered in different orders would wait for each other for ever. Hence a token
that passes from stage to stage; gathering a first bucket, or writing files, needs no turn.

Invariants
- The stage before hands on its token exactly once for each `take`, also when it has failed.
- A stage after one that failed sends nothing: its `take` raises `EarlierStageFailed`.

`publisher.py` has that of a real trainer; a sender that is alone needs none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_async.errors import ComponentFailure

# Senders of a trainer that send at the same time; the simulator counts with as many.
SENDERS_AT_ONCE: Final = 1


class EarlierStageFailed(ComponentFailure):
    """The stage before did not get through; its own leader has the reason."""


@dataclass(frozen=True)
class StageToken:
    """Work of the stages before: the names they have sent, and what they have written."""

    names: frozenset[str] = frozenset()
    written: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False


class StageOrder:
    """A leader's place in the order of senders; this one is a sender alone."""

    index = 0
    last = True

    def take(self) -> StageToken:
        """Wait for the stage before. Raises EarlierStageFailed."""
        return StageToken()

    def hand_on(self, token: StageToken) -> None:
        """Let the next stage go on; does nothing on the last one."""

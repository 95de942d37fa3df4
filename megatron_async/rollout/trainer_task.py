"""Names the tasks that a trainer must do before it gets its next batch."""

import enum


class TrainerTask(enum.Enum):
    """Task that a trainer must do before it asks for a batch again.

    `SEND_WEIGHTS`: send the current weights to engines that are new or have loaded wrong weights.
    `VERIFY`: compute log-probs of the tokens that engines have sampled with the newest weights.
    """

    SEND_WEIGHTS = "send weights"
    VERIFY = "verify"

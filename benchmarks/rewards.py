"""How many scores a second the pool of scorers gives, blocking and asynchronous.

    python benchmarks/rewards.py [--placed] [--scores 20000] [--waiting 500]

Responses of about 60 characters come all at once, as at the end of a batch; the time runs from the
first request to the last score, tokens to text included, after one score that starts the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_async.config.reward import RewardConfig, ScorerSettings
from megatron_async.config.rollout import TaskConfig
from megatron_async.models.tiny_model import character_tokenizer, write_character_tokenizer
from megatron_async.places.local import local_place
from megatron_async.scoring.pool import ScorerPool
from megatron_async.scoring.workers import LocalScorerPool, PlacedScorerPool
from megatron_async.trajectory.types import Prompt

_WORKERS = 2
_REWARDS = Path(__file__).resolve().with_name("plain_rewards.py")


class Taken(NamedTuple):
    """Seconds on the clock, and those that this process (not the scorers) computed."""

    seconds: float
    computed: float


def time_of(reward: str, count: int, placed: bool) -> Taken:
    """The time of `count` scores at once, by a pool of two scorer processes."""
    settings = ScorerSettings(
        task=TaskConfig(scorer_workers=_WORKERS),
        rewards=[RewardConfig(name=f"{_REWARDS}:{reward}")],
    )
    payload = {"question": "1+1", "answer": "2", "metadata": {"level": 1}}
    prompt = Prompt(np.zeros(1, np.int32), "any", payload)
    ids = character_tokenizer().encode("1+1=2." * 10)

    async def measure(pool: ScorerPool) -> Taken:
        await pool.score(prompt, ids)
        began, own = time.monotonic(), time.process_time()
        scores = await asyncio.gather(*(pool.score(prompt, ids) for _ in range(count)))
        taken = Taken(time.monotonic() - began, time.process_time() - own)
        assert all(score == (1.0, {}) for score in scores)
        return taken

    with tempfile.TemporaryDirectory() as folder, local_place(Path(folder)) as place:
        write_character_tokenizer(Path(folder))
        pool = (
            PlacedScorerPool(settings, folder, place)
            if placed
            else LocalScorerPool(settings, folder)
        )
        try:
            return asyncio.run(measure(pool))
        finally:
            pool.close()


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--placed", action="store_true", help="by workers in processes, as on a cluster"
    )
    parser.add_argument("--scores", type=int, default=20_000)
    parser.add_argument("--waiting", type=int, default=500)
    options = parser.parse_args()
    blocking = time_of("trivial", options.scores, options.placed)
    asynchronous = time_of("waiting", options.waiting, options.placed)
    print(
        json.dumps(
            {
                "pool": "placed" if options.placed else "local",
                "scores": options.scores,
                "seconds": round(blocking.seconds, 2),
                "scores_per_second": round(options.scores / blocking.seconds),
                "of_it_computed_by_the_pool": round(blocking.computed, 2),
                "waiting": options.waiting,
                "waiting_seconds": round(asynchronous.seconds, 2),
            }
        )
    )


if __name__ == "__main__":
    main()

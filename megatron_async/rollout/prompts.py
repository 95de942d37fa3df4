"""Provides training prompts in order, and skips some of them, depending on how often the policy's
responses to them were right. A difficulty pool is a range of pass rates; its `share` is the
probability with which a prompt of the pool is used.

Invariants
- Without pools (`task.difficulty.pools`), group n gets prompt n in the task's order.
- With pools, `difficulty.jsonl` has a line for each group (the position of its prompt in the task's
  order) and for each score (its prompt, and whether the response was right). Whether the prompt at
  a position is used depends only on the scores before. A resumed run continues after the position
  of its last group.
- At most `_MAX_SKIPPED` prompts in a row are skipped; the next one is used whatever its pool is, so
  that a small `share` cannot stop the run.
"""

import json
from pathlib import Path

from megatron_async.config.data import DifficultyConfig
from megatron_async.files.disk import JsonLinesFile, json_lines
from megatron_async.tasks.base import Task, stable_hash
from megatron_async.trajectory.types import Prompt

_MAX_SKIPPED = 1000
_HASH_RANGE = 1 << 64


def prompt_key(prompt: Prompt) -> str:
    """Return an identifier of a prompt that depends only on its tokens, or on its row if it has no
    tokens.

    The prompt of an episode has no tokens.
    """
    text = prompt.token_ids.tobytes().hex() or json.dumps(prompt.payload, sort_keys=True)
    return f"{stable_hash('prompt', text):016x}"


class PassRates:
    """Number of scored responses and of right responses for each prompt, and the difficulty pool
    that follows from their quotient."""

    def __init__(self, config: DifficultyConfig) -> None:
        self._config = config
        self._tally: dict[str, tuple[int, int]] = {}

    def add(self, key: str, right: bool) -> None:
        """Count one scored response to the prompt with this key; `right` says whether it was
        right."""
        attempts, solved = self._tally.get(key, (0, 0))
        self._tally[key] = attempts + 1, solved + right

    def pool(self, key: str) -> int | None:
        """Return the index of a prompt's difficulty pool; None while it has fewer than
        `min_attempts` scored responses."""
        attempts, solved = self._tally.get(key, (0, 0))
        if attempts < self._config.min_attempts:
            return None
        rate = solved / attempts
        return next(i for i, pool in enumerate(self._config.pools) if rate <= pool.up_to)

    def is_used(self, key: str, position: int) -> bool:
        """Return whether the prompt at `position` in the task's order is used rather than skipped.

        The decision is pseudorandom: it depends only on the prompt, the position and the pool, and
        is True with the pool's `share` as probability. A prompt without a pool is always used.
        """
        pool = self.pool(key)
        share = 1.0 if pool is None else self._config.pools[pool].share
        return stable_hash("turn", key, position) < share * _HASH_RANGE

    def metrics(self) -> dict[str, float]:
        """Return metrics of the prompts that have a pool: their number, mean pass rate, and the
        share in each pool."""
        pools = [pool for key in self._tally if (pool := self.pool(key)) is not None]
        if not pools:
            return {}
        known = [t for t in self._tally.values() if t[0] >= self._config.min_attempts]
        rate = sum(solved / attempts for attempts, solved in known) / len(known)
        metrics = {"difficulty/prompts": float(len(pools)), "difficulty/pass_rate": rate}
        for number in range(len(self._config.pools)):
            metrics[f"difficulty/pool_{number}"] = pools.count(number) / len(pools)
        return metrics


class TaskPrompts:
    """Training prompts of `task` in order, starting with the first prompt that has no group yet.

    Args:
        file: File for positions and scores; it is created only if there are pools.
        groups: Number of groups that exist already; each has one prompt.
        solved_at: Smallest reward with which a response counts as right.
    """

    def __init__(
        self, task: Task, config: DifficultyConfig, file: Path, groups: int, solved_at: float = 1.0
    ) -> None:
        self._task = task
        self._solved_at = solved_at
        self._group = groups
        self._position = groups
        self._rates = PassRates(config)
        self._skipped = 0
        self._file: JsonLinesFile | None = None
        if config.pools:
            if file.exists():
                self._restore(file)
            self._file = JsonLinesFile(file)

    def _restore(self, file: Path) -> None:
        last: tuple[int, int] | None = None
        for line in json_lines(file.read_bytes()):
            match line:
                case {"group": int(group), "position": int(position)}:
                    if group < self._group and (last is None or group >= last[0]):
                        last = group, position
                case {"prompt": str(key), "right": bool(right)}:
                    self._rates.add(key, right)
        # Groups without a line were added in sessions without pools: one prompt each, in order.
        if last is not None:
            self._position = last[1] + self._group - last[0]

    @property
    def epoch_size(self) -> int | None:
        """Number of training problems in one epoch; None if the task generates problems
        endlessly."""
        return self._task.counts(0)[0]

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts that are used, and skip the others; fewer if the task has
        no more."""
        if self._file is None:
            prompts = self._task.train_prompts(self._position, count)
            self._position += len(prompts)
            return prompts
        taken = [self._next(self._file) for _ in range(count)]
        self._file.flush()
        return taken

    def _next(self, file: JsonLinesFile) -> Prompt:
        for skipped in range(_MAX_SKIPPED + 1):
            (prompt,) = self._task.train_prompts(self._position, 1)
            self._position += 1
            used = self._rates.is_used(prompt_key(prompt), self._position - 1)
            if used or skipped == _MAX_SKIPPED:
                break
            self._skipped += 1
        file.write(f'{{"group": {self._group}, "position": {self._position - 1}}}\n')
        self._group += 1
        return prompt

    def scored(self, prompt: Prompt, reward: float | None) -> None:
        """Count the reward of a response to `prompt` in the prompt's pass rate, and record it in
        the file.

        Nothing is counted without pools, or if `reward` is None because the scorer failed.
        """
        if self._file is None or reward is None:
            return
        key, right = prompt_key(prompt), reward >= self._solved_at
        self._rates.add(key, right)
        self._file.write(f'{{"prompt": "{key}", "right": {str(right).lower()}}}\n')

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of pass rates, and the number of prompts skipped since the last call;
        {} without pools."""
        if self._file is None:
            return {}
        skipped, self._skipped = self._skipped, 0
        return {"difficulty/skipped": float(skipped), **self._rates.metrics()}

    def close(self) -> None:
        """Write buffered lines to the file of positions and scores, and close the file."""
        if self._file is not None:
            self._file.close()

"""Training prompts in order, some of them passed over by how often they were answered right.

Invariants
- Without pools, group n is prompt n of the task's order.
- With pools, `difficulty.jsonl` has a line for each group (the position of its prompt) and for each
  score (its prompt, and whether it was right). What is asked at a position depends on the scores
  before and on nothing else; a restored run goes on after the position of its last group.
- A prompt is asked at the latest after `_MAX_SKIPPED` others, whatever its pool.
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
    """A name of the prompt that depends on its tokens only; of an episode's, on its row."""
    text = prompt.token_ids.tobytes().hex() or json.dumps(prompt.payload, sort_keys=True)
    return f"{stable_hash('prompt', text):016x}"


class PassRates:
    """Attempts and right responses of each prompt, and the pool that follows."""

    def __init__(self, config: DifficultyConfig) -> None:
        self._config = config
        self._tally: dict[str, tuple[int, int]] = {}

    def add(self, key: str, right: bool) -> None:
        """Count a scored response."""
        attempts, solved = self._tally.get(key, (0, 0))
        self._tally[key] = attempts + 1, solved + right

    def pool(self, key: str) -> int | None:
        """The number of the prompt's pool; None before it has one."""
        attempts, solved = self._tally.get(key, (0, 0))
        if attempts < self._config.min_attempts:
            return None
        rate = solved / attempts
        return next(i for i, pool in enumerate(self._config.pools) if rate <= pool.up_to)

    def asked(self, key: str, position: int) -> bool:
        """True when the prompt is asked in its turn at `position`."""
        pool = self.pool(key)
        share = 1.0 if pool is None else self._config.pools[pool].share
        return stable_hash("turn", key, position) < share * _HASH_RANGE

    def metrics(self) -> dict[str, float]:
        """Prompts that have a pool, their mean pass rate, and the share in each pool."""
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
    """The prompts of `task` after the first `groups`.

    Args:
        file: where positions and scores are kept; it is made only where there are pools.
        solved_at: reward from which on a response counts as right.
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
        if last is not None:  # groups without a line came before there were pools
            self._position = last[1] + self._group - last[0]

    @property
    def in_epoch(self) -> int | None:
        """Return the number of training problems; None: they have no end."""
        return self._task.counts(0)[0]

    def take(self, count: int) -> list[Prompt]:
        """The next prompts; fewer when the source is exhausted."""
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
            asked = self._rates.asked(prompt_key(prompt), self._position - 1)
            if asked or skipped == _MAX_SKIPPED:
                break
            self._skipped += 1
        file.write(f'{{"group": {self._group}, "position": {self._position - 1}}}\n')
        self._group += 1
        return prompt

    def scored(self, prompt: Prompt, reward: float | None) -> None:
        """Count a score of a response to `prompt`, unless the scorer failed."""
        if self._file is None or reward is None:
            return
        key, right = prompt_key(prompt), reward >= self._solved_at
        self._rates.add(key, right)
        self._file.write(f'{{"prompt": "{key}", "right": {str(right).lower()}}}\n')

    def take_metrics(self) -> dict[str, float]:
        """Pass rates, and the prompts passed over since the last call; nothing without pools."""
        if self._file is None:
            return {}
        skipped, self._skipped = self._skipped, 0
        return {"difficulty/skipped": float(skipped), **self._rates.metrics()}

    def close(self) -> None:
        """Write what is left."""
        if self._file is not None:
            self._file.close()

"""Problems and scorers of reasoning-gym's procedural tasks.

Some tasks can write worked answers, supervised examples, for themselves.

Invariants
- Problem `index` depends on the task's arguments, the seed and `index` only. Seeds are hashed per
  chunk: reasoning-gym itself seeds item i with `seed + i`, so its nearby seeds share problems.
- The payload names the problem (arguments' place in the mixture, chunk seed, offset); the scorer
  makes it again and refuses to score when the answer that comes out is another one.
- Scoring is reasoning-gym's own `score_answer`.
- Every worked answer ends with `ANSWER_MARKER` and an answer that gets full score.
- A worked answer is a pure function of the problem and `seed`.

The demonstrations are deliberately of several styles, as collected data are: full ones write every
step out (and are long), terse ones note the running results, direct ones state only the result. A
model that imitates them all answers many problems without working and gets them wrong; that it
pays to work is for RL to find out.
"""

import itertools
import random
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import reasoning_gym
from reasoning_gym.factory import DATASETS

from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.answers import final_answer
from megatron_async.tasks.base import (
    Listed,
    Problem,
    is_heldout,
    row_payload,
    stable_hash,
)

ANSWER_MARKER: Final = "#"
STEP_SEPARATOR: Final = ";"

_CHAIN: Final = re.compile(r"\d+([+-]\d+)*")


def chain_sum_steps(expression: str) -> tuple[list[int], list[str]]:
    """`4 - 1 + 2` as its running totals 4, 3, 5 and its steps -1, +2. ValueError otherwise."""
    compact = expression.replace(" ", "")
    if _CHAIN.fullmatch(compact) is None:
        raise ValueError(f"{expression!r} is not a chain of sums")
    numbers = re.findall(r"[+-]?\d+", compact)
    steps = [f"{number[0]}{int(number[1:])}" for number in numbers[1:]]
    return list(itertools.accumulate(map(int, numbers))), steps


def chain_sum_full(expression: str) -> str:
    """Every step: `4-1=3;3+2=5#5`."""
    totals, steps = chain_sum_steps(expression)
    written = [
        f"{before}{step}={after}"
        for before, step, after in zip(totals, steps, totals[1:], strict=False)
    ]
    return f"{STEP_SEPARATOR.join(written)}{ANSWER_MARKER}{totals[-1]}"


def chain_sum_terse(expression: str) -> str:
    """Running results: `3;5#5`."""
    totals, _ = chain_sum_steps(expression)
    return f"{STEP_SEPARATOR.join(map(str, totals[1:]))}{ANSWER_MARKER}{totals[-1]}"


def chain_sum_direct(expression: str) -> str:
    """The result: `#5`."""
    return f"{ANSWER_MARKER}{chain_sum_steps(expression)[0][-1]}"


def chain_sum_answer(metadata: dict[str, Any], direct: float, terse: float, seed: int) -> str:
    """Return a worked answer: direct, terse or full; `direct`, `terse`: their shares."""
    chance = random.Random(seed).random()
    expression = str(metadata["expression"])
    if chance < direct:
        return chain_sum_direct(expression)
    if chance < direct + terse:
        return chain_sum_terse(expression)
    return chain_sum_full(expression)


WORKED_ANSWERS: Final = {"chain_sum": chain_sum_answer}


_CHUNK: Final = 1000
_MAX_REDRAWS: Final = 200
_MAX_HELDOUT_DRAWS_EACH: Final = 40
_SFT_SEED_OFFSET: Final = "worked"
_SEED_RANGE: Final = 1 << 31

# Tasks of reasoning-gym 0.1.25 on which RL would learn nonsense.
UNUSABLE: Final = {"game_of_life_halting": "its scorer gives full score to every answer"}


class ReasoningGymProblems:
    """Draws problems of one task; `params.mixture` weighs several sets of its arguments."""

    def __init__(self, config: TaskConfig) -> None:
        self.name = config.name
        self._config = config
        self._datasets = _Datasets(config)
        self._problem("check", config.train_seed, 0, 0)

    def train(self, index: int) -> Problem:
        """Training problem `index`; one whose text is held out is drawn again."""
        return self._training_problem("train", index)

    def longer(self, size: int) -> Iterator[Listed]:
        """The first: problems are made as they are asked for."""
        yield Listed((0, 0), f"{self.name}, problem 0", self.train(0))

    def leave_out(self, places: Collection[tuple[int, int]]) -> None:
        """Impossible, for the same reason."""
        raise UserError(
            f"task.filter_overlong leaves rows of files out; task {self.name} has none: make its "
            "prompts shorter or the context longer"
        )

    def summary(self) -> str:
        """The name of the task."""
        return f"procedural problems of {self.name}"

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` different held-out problems of `eval_seed`'s order."""
        if not count:
            raise UserError("eval.prompts 0 means all, and a procedural task has no end of them")
        found = self._different_heldout(count)
        if len(found) < count:
            raise UserError(
                f"task {self.name} with params {self._config.params} has only {len(found)} "
                f"different held-out problems at task.heldout_share "
                f"{self._config.heldout_share}, eval.prompts asks for {count}"
            )
        return found

    def counts(self, heldout: int) -> tuple[None, int]:
        """Training problems have no end; those held out may."""
        return None, len(self._different_heldout(heldout))

    def _different_heldout(self, count: int) -> list[Problem]:
        found: dict[str, Problem] = {}
        limit = int(count * _MAX_HELDOUT_DRAWS_EACH / self._config.heldout_share)
        for index in range(limit):
            if len(found) == count:
                break
            problem = self._problem("heldout", self._config.eval_seed, index, 0)
            if is_heldout(problem.question, self._config.heldout_share):
                found.setdefault(problem.question, problem)
        return list(found.values())

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """Training problems (of an order of their own) with worked answers."""
        write = WORKED_ANSWERS.get(self.name)
        if write is None:
            raise UserError(
                f"task {self.name} has no worked answers of its own; set sft.data to a JSONL file "
                f"with `prompt` and `response` (tasks that have: {', '.join(WORKED_ANSWERS)})"
            )
        shares = self._config.direct_share, self._config.terse_share
        found = []
        for index in range(count):
            problem = self._training_problem(_SFT_SEED_OFFSET, index)
            style_seed = stable_hash("style", self._config.train_seed, index)
            found.append((problem, write(problem.fields, *shares, style_seed)))
        return found

    def _training_problem(self, purpose: str, index: int) -> Problem:
        for attempt in range(_MAX_REDRAWS):
            problem = self._problem(purpose, self._config.train_seed, index, attempt)
            if not is_heldout(problem.question, self._config.heldout_share):
                return problem
        raise UserError(
            f"task {self.name} with params {self._config.params} has no training problem left at "
            f"task.heldout_share {self._config.heldout_share}"
        )

    def _problem(self, purpose: str, seed: int, index: int, attempt: int) -> Problem:
        """Draw the arguments, the chunk (as its seed) and the place in it."""
        chance = random.Random(stable_hash("component", purpose, seed, index, attempt))
        weights = self._datasets.weights
        component = chance.choices(range(len(weights)), weights)[0]
        chunk, offset = divmod(index, _CHUNK)
        chunk_seed = stable_hash("chunk", purpose, seed, component, chunk, attempt) % _SEED_RANGE
        entry = self._datasets.chunk(component, chunk_seed)[offset]
        metadata = {k: v for k, v in entry["metadata"].items() if isinstance(v, (str, int))}
        texts = {k: str(v) for k, v in metadata.items()}
        payload = row_payload(entry["question"], str(entry["answer"]), metadata)
        payload |= {"component": component, "seed": chunk_seed, "index": offset}
        return Problem(entry["question"], payload, texts)


class ReasoningGymScorer:
    """reasoning-gym's scorer of one task."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._datasets = _Datasets(config)

    def score(self, payload: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
        """Reward and parts of the answer that `text` ends in; without one, reward 0.

        Raises ValueError when the problem cannot be made again, and whatever the scorer raises.
        """
        answer = final_answer(text, self._config.answer_marker)
        if answer is None:
            return 0.0, {"score": 0.0, "answered": 0.0}
        dataset = self._datasets.chunk(payload["component"], payload["seed"])
        entry = dataset[payload["index"]]
        if str(entry["answer"]) != payload["answer"]:
            raise ValueError(
                f"{self._config.name} made another problem for seed {payload['seed']}, index "
                f"{payload['index']}: its answer is {entry['answer']!r}, not {payload['answer']!r}"
            )
        score = float(dataset.score_answer(answer, entry))
        reward = float(score >= 1.0) if self._config.full_score_only else score
        return reward, {"score": score, "answered": 1.0}


class _Datasets:
    """Chunks of a task's problems, the last ones kept; `weights`: those of the mixture.

    `params` beside `mixture` are common to all of its parts.
    """

    def __init__(self, config: TaskConfig) -> None:
        """Refuse settings that name no task or no mixture. Raises UserError."""
        if config.name in UNUSABLE:
            raise UserError(f"task.name {config.name!r} cannot be used: {UNUSABLE[config.name]}")
        if config.name not in DATASETS:
            raise UserError(f"task.name {config.name!r} is not a task of reasoning-gym")
        common = {key: value for key, value in config.params.items() if key != "mixture"}
        parts = config.params.get("mixture", [{"weight": 1.0}])
        if not isinstance(parts, list) or not parts:
            raise UserError(f"task.params.mixture must be a list of arguments, got {parts!r}")
        self.weights: list[float] = []
        self._arguments: list[dict[str, Any]] = []
        for part in parts:
            weight = part.get("weight") if isinstance(part, dict) else None
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight <= 0:
                raise UserError(f"task.params.mixture: {part!r} needs a positive `weight`")
            self.weights.append(float(weight))
            own = {key: value for key, value in part.items() if key != "weight"}
            self._arguments.append({**common, **own})
        self._name = config.name
        self.chunk = lru_cache(maxsize=64)(self._make)

    def _make(self, component: int, seed: int) -> Any:
        """Make a chunk. Raises UserError for arguments that the task refuses."""
        arguments = self._arguments[component]
        reserved = {"seed", "size"} & arguments.keys()
        if reserved:
            raise UserError(f"task.params may not set {sorted(reserved)[0]!r}; see task.train_seed")
        try:
            return reasoning_gym.create_dataset(self._name, seed=seed, size=_CHUNK, **arguments)
        except (TypeError, AssertionError, ValueError) as error:
            raise UserError(
                f"task.params {arguments} are refused by {self._name}: {error}"
            ) from error

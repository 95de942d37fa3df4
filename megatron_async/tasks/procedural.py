"""Provides problems that are generated on demand, and their scorer.

The problems are this project's own sums (`chain_sum.py`) or the problems of a task of
reasoning-gym, which is an optional package (`reasoning_gym.py`).

Invariants
- A problem depends only on the task's arguments, the seed and the problem's index. Problems are
  generated in chunks of `CHUNK` problems. A data set generates item i of a chunk from the seed
  `chunk seed + i`, so chunks with nearby seeds would share problems. Chunk seeds are therefore
  hashes, which are far apart.
- The payload of a problem has everything to generate it again: the set of arguments that was drawn
  for it (its component of the mixture), its chunk's seed and its index in the chunk. The scorer
  generates the problem again and raises an error if the reference answer of the new problem is not
  the one that the payload has.
"""

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Final

from megatron_async.config.evaluation import HELDOUT_SEED
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.tasks.answers import final_answer
from megatron_async.tasks.base import (
    Dataset,
    Problem,
    ProblemLocation,
    is_heldout,
    row_payload,
    stable_hash,
)
from megatron_async.tasks.chain_sum import ChainSums

CHAIN_SUM: Final = "chain_sum"
CHUNK: Final = 1000
"""Number of problems that are generated from one seed."""
_MAX_REDRAWS: Final = 200
_MAX_HELDOUT_DRAWS_EACH: Final = 40
_SFT_SEED_OFFSET: Final = "worked"
_SEED_RANGE: Final = 1 << 31


class ProceduralProblems:
    """Problem source that generates the problems of one procedural task, without end.

    `task.params.mixture` may list several sets of arguments with weights; each problem draws one
    set.
    """

    def __init__(self, config: TaskConfig) -> None:
        self.name = task_name(config)
        self._config = config
        self._datasets = _Datasets(config)
        # Generate one problem now: this raises an error if the task refuses the arguments.
        self._problem("check", config.train_seed, 0, 0)

    def train(self, index: int) -> Problem:
        """Return training problem `index`; if the drawn problem is held out, draw again."""
        return self._training_problem("train", index)

    def problems_longer_than(self, size: int) -> Iterator[tuple[ProblemLocation, Problem]]:
        """Yield the first training problem only, since the problems have no end."""
        yield (0, 0), replace(self.train(0), where=f"{self.name}, problem 0")

    def exclude(self, places: Collection[ProblemLocation]) -> None:
        """Raise a UserError, because generated problems cannot be removed."""
        raise UserError(
            f"task.long_prompts filter removes rows of files; task {self.name} has none: make its "
            "prompts shorter or the context longer"
        )

    def summary(self) -> str:
        """Return a phrase with the name of the task."""
        return f"procedural problems of {self.name}"

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` different held-out problems, in an order that all runs share.

        Raises:
            UserError: If `count` is 0 (all), or if there are too few different held-out problems.
        """
        if not count:
            raise UserError(
                "eval.prompts is 0 (all), but a procedural task generates problems endlessly. Set "
                "a positive number."
            )
        found = self._different_heldout(count)
        if len(found) < count:
            raise UserError(
                f"task {self.name} with params {self._config.params} has only {len(found)} "
                f"different held-out problems at task.heldout_share "
                f"{self._config.heldout_share}; eval.prompts is {count}. Lower it."
            )
        return found

    def counts(self, heldout: int) -> tuple[None, int]:
        """Return None, since training problems are endless, and the number of held-out problems.

        Held-out problems are counted up to `heldout` only.
        """
        return None, len(self._different_heldout(heldout))

    def _different_heldout(self, count: int) -> list[Problem]:
        """Return up to `count` different held-out problems.

        The search stops after a limited number of draws, because small ranges of arguments have few
        different problems.
        """
        found: dict[str, Problem] = {}
        limit = int(count * _MAX_HELDOUT_DRAWS_EACH / self._config.heldout_share)
        for index in range(limit):
            if len(found) == count:
                break
            problem = self._problem("heldout", HELDOUT_SEED, index, 0)
            if is_heldout(problem.question, self._config.heldout_share):
                found.setdefault(problem.question, problem)
        return list(found.values())

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """Return `count` training problems with worked answers, for supervised fine-tuning.

        Their order differs from the order in which reinforcement learning gets its problems.

        Raises:
            UserError: If the task is not chain_sum, which is the only one with worked answers.
        """
        if self._config.kind != CHAIN_SUM:
            raise UserError(
                f"task {self.name} has no worked answers. Set sft.data to a JSONL file "
                f"with `prompt` and `response` (only task.kind {CHAIN_SUM} has worked answers)"
            )
        found = []
        for index in range(count):
            problem = self._training_problem(_SFT_SEED_OFFSET, index)
            style_seed = stable_hash("style", self._config.train_seed, index)
            dataset = self._datasets.chunk(problem.payload["component"], problem.payload["seed"])
            assert isinstance(dataset, ChainSums)
            found.append((problem, dataset.worked_answer(problem.fields["expression"], style_seed)))
        return found

    def _training_problem(self, purpose: str, index: int) -> Problem:
        """Return problem `index` of the order that `purpose` and `task.train_seed` determine.

        If the drawn problem is held out for evaluation, another one is drawn for the same index.

        Raises:
            UserError: If every draw is held out.
        """
        for attempt in range(_MAX_REDRAWS):
            problem = self._problem(purpose, self._config.train_seed, index, attempt)
            if not is_heldout(problem.question, self._config.heldout_share):
                return problem
        raise UserError(
            f"task {self.name} with params {self._config.params} has no training problem left at "
            f"task.heldout_share {self._config.heldout_share}"
        )

    def _problem(self, purpose: str, seed: int, index: int, attempt: int) -> Problem:
        """Generate problem `index` of an order, with arguments drawn from `task.params.mixture`.

        The mixture lists sets of arguments; a component is one of these sets.

        Args:
            purpose: Name of the order; different orders have different problems.
            seed: Seed of the order.
            index: Index of the problem in the order.
            attempt: Number of earlier draws for this index that were held out.
        """
        chance = random.Random(stable_hash("component", purpose, seed, index, attempt))
        weights = self._datasets.weights
        component = chance.choices(range(len(weights)), weights)[0]
        chunk, offset = divmod(index, CHUNK)
        chunk_seed = stable_hash("chunk", purpose, seed, component, chunk, attempt) % _SEED_RANGE
        entry = self._datasets.chunk(component, chunk_seed)[offset]
        metadata = {k: v for k, v in entry["metadata"].items() if isinstance(v, (str, int))}
        texts = {k: str(v) for k, v in metadata.items()}
        if self._config.kind == CHAIN_SUM:
            texts["compact"] = texts["expression"].replace(" ", "")
        payload = row_payload(entry["question"], str(entry["answer"]), metadata)
        payload |= {"component": component, "seed": chunk_seed, "index": offset}
        return Problem(entry["question"], payload, texts)


class ProceduralScorer:
    """Scores responses to the problems of a procedural task."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._datasets = _Datasets(config)

    def score(self, payload: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
        """Score a response: return its reward and the components of the reward by name.

        The final answer in `text` is scored. A text without an answer has reward 0.

        Raises:
            ValueError: If the data set now generates another problem for the same seed and index.
                Exceptions of the data set's own scorer are passed on.
        """
        answer = final_answer(text, self._config.answer_marker)
        if answer is None:
            return 0.0, {"score": 0.0, "answered": 0.0}
        dataset = self._datasets.chunk(payload["component"], payload["seed"])
        entry = dataset[payload["index"]]
        if str(entry["answer"]) != payload["answer"]:
            raise ValueError(
                f"{task_name(self._config)} made another problem for seed {payload['seed']}, index "
                f"{payload['index']}; its answer is {entry['answer']!r}, not {payload['answer']!r}"
            )
        score = float(dataset.score_answer(answer, entry))
        reward = float(score >= 1.0) if self._config.full_score_only else score
        return reward, {"score": score, "answered": 1.0}


def task_name(config: TaskConfig) -> str:
    """Return the name of the procedural task that `config` selects."""
    return CHAIN_SUM if config.kind == CHAIN_SUM else config.name


class _Datasets:
    """Generates the problems of a task in chunks and caches the chunks used last.

    Each component of the mixture has a weight in `weights` and its own arguments. Entries of
    `task.params` other than `mixture` are arguments of all components.
    """

    def __init__(self, config: TaskConfig) -> None:
        """Check the task's name and the mixture, which lists sets of arguments.

        Raises:
            UserError: If either is invalid.
        """
        if config.kind != CHAIN_SUM:
            from megatron_async.tasks.reasoning_gym import check_name

            check_name(config.name)
        common = {key: value for key, value in config.params.items() if key != "mixture"}
        components = config.params.get("mixture", [{"weight": 1.0}])
        if not isinstance(components, list) or not components:
            raise UserError(f"task.params.mixture must be a list of arguments, got {components!r}")
        self.weights: list[float] = []
        self._arguments: list[dict[str, Any]] = []
        for component in components:
            weight = component.get("weight") if isinstance(component, dict) else None
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight <= 0:
                raise UserError(f"task.params.mixture: {component!r} needs a positive `weight`")
            self.weights.append(float(weight))
            own = {key: value for key, value in component.items() if key != "weight"}
            self._arguments.append({**common, **own})
        self._name = task_name(config)
        self._kind = config.kind
        self.chunk = lru_cache(maxsize=64)(self._make)

    def _make(self, component: int, seed: int) -> Dataset:
        """Generate the chunk of problems for `seed` and set number `component` of the mixture.

        Raises:
            UserError: If the task refuses the arguments.
        """
        arguments = self._arguments[component]
        reserved = {"seed", "size"} & arguments.keys()
        if reserved:
            raise UserError(f"task.params may not set {sorted(reserved)[0]!r}; see task.train_seed")
        try:
            if self._kind == CHAIN_SUM:
                return ChainSums(seed=seed, **_known(arguments))
            from megatron_async.tasks.reasoning_gym import make_dataset

            return make_dataset(self._name, seed=seed, size=CHUNK, **arguments)
        except (TypeError, AssertionError, ValueError) as error:
            raise UserError(
                f"task.params {arguments} are refused by {self._name}: {error}"
            ) from error


def _known(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return `arguments` unchanged if chain_sum accepts all of them.

    Raises:
        UserError: If chain_sum has no such argument.
    """
    names = sorted(field.name for field in fields(ChainSums) if field.name != "seed")
    for name in arguments:
        if name not in names:
            raise UserError(
                f"task.params.{name} is not a parameter of {CHAIN_SUM}. Its parameters are "
                f"{', '.join(names)}."
            )
    return arguments

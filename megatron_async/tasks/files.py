"""Problems from files: what is trained on, in which order, and what is kept for evaluation.

Invariants
- Every row is read once before anything starts; a refusal lists bad rows by file, line and column.
- Which row stands at a position follows from the settings and the files alone: a run that is
  restored at a position asks what an uninterrupted one would have asked.
- Training runs through each file epoch by epoch: every training row once, in an order that depends
  on `train_seed` and the epoch only. Files take turns by their weights; each keeps its own place.
- A problem that occurs twice is on one side only, and none that an evaluation set holds is trained
  on: the side follows from its text.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, partial

import orjson

from megatron_async.config.data import DataConfig, FileConfig
from megatron_async.config.evaluation import HELDOUT_SEED
from megatron_async.errors import UserError
from megatron_async.tasks.base import Problem, ProblemLocation, is_heldout_key, stable_hash
from megatron_async.tasks.index_cache import LEAST_ROWS, Index, kept
from megatron_async.tasks.layouts import Columns, value_at
from megatron_async.tasks.prompts import PromptRenderer
from megatron_async.tasks.rows import MOST_BAD_ROWS_SHOWN, open_rows, report_bad_rows

_MESSAGE_BYTES = 64  # more than a chat template writes around one


class ProblemFile:
    """The problems of one file, read when they are asked for; an index of some 50 bytes a row.

    `mode` (task.bad_rows) skip: rows that cannot be used are left out, with a warning. `prompts`:
    renders each row; a row that cannot be rendered cannot be used either.
    """

    def __init__(
        self,
        file: FileConfig,
        setting: str,
        template: str = "",
        mode: str = "refuse",
        prompts: PromptRenderer | None = None,
    ) -> None:
        self._prompts = prompts
        self._rows = open_rows(file.path, file.split, setting)
        self._columns = Columns.of(file.layout, file.columns, template)
        self.what = f"{setting} {file.path}"
        large = len(self._rows) >= LEAST_ROWS
        make = partial(self._index, file)
        state = template if prompts is None else f"{template}\n{prompts.identity()}"
        index = kept(file, state, make) if large else make()
        self.places, self.keys, self.sizes = index
        if 0 in self.sizes:
            self._report_bad(mode)
            good = [number for number, size in enumerate(self.sizes) if size]
            columns = (array("Q", map(column.__getitem__, good)) for column in index)
            self.places, self.keys, self.sizes = columns

    def _index(self, file: FileConfig) -> Index:
        """Read every row: places, keys and sizes of the problems; a bad row has the size 0."""
        places, keys, sizes = array("Q"), array("Q"), array("Q")
        for place, row in enumerate(self._rows):
            key = size = 0
            if not isinstance(row, UserError):
                if any(value_at(row, name) != value for name, value in file.filter.items()):
                    continue
                with suppress(UserError):
                    problem = self._columns.problem(row, self._rows.where(place))
                    if self._prompts is not None:
                        self._prompts.check(problem)
                    key, size = problem.key, _size(problem, self._columns.named)
            places.append(place)
            keys.append(key)
            sizes.append(size)
        if not places:
            raise UserError(f"{self.what} has no row with {file.filter}")
        return places, keys, sizes

    def _report_bad(self, mode: str) -> None:
        places = [p for p, size in zip(self.places, self.sizes, strict=True) if not size]
        found = [self._rows.where(place) for place in places]
        problems = 0
        for number, place in enumerate(places[:MOST_BAD_ROWS_SHOWN]):
            where = found[number]
            try:
                problem = self._columns.problem(self._rows[place], where)
                problems += 1
                if self._prompts is not None:
                    self._prompts.check(problem)
            except UserError as error:
                found[number] = str(error) if str(error).startswith(where) else f"{where}: {error}"
        report_bad_rows(self.what, found, len(self.places), mode, readable=problems > 0)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Problem:
        where = self.where(index)
        problem = self._columns.problem(self._rows[self.places[index]], where)
        if problem.key != self.keys[index]:
            raise UserError(f"{where} has changed since the start")
        return problem

    def where(self, index: int) -> str:
        """The place of problem `index`, for a refusal."""
        return self._rows.where(self.places[index])

    def first(self, count: int, seed: int) -> list[Problem]:
        """`count` problems of an order that `seed` gives, all different; 0: all there are."""
        indices = list(dict(zip(self.keys, range(len(self)), strict=True)).values())
        if count > len(indices):
            raise UserError(
                f"{self.what} holds {len(indices)} different problems; {count} are asked for"
            )
        random.Random(stable_hash("evaluation order", seed)).shuffle(indices)
        return [self[index] for index in indices[: count or None]]


def _size(problem: Problem, named: Collection[str]) -> int:
    """Bytes of the parts that a prompt is made of."""
    texts = [problem.fields.get(name, "") for name in named]
    if not problem.messages:
        texts.append(problem.question)
    whole = sum(len(text.encode()) for text in texts)
    for message in problem.messages:
        others = message.keys() - {"role", "content"}
        whole += len(message["content"].encode()) + _MESSAGE_BYTES
        whole += sum(len(orjson.dumps({name: message[name]})) for name in others)
    return whole


class _Epochs:
    """The training rows of one file, shuffled anew for each epoch."""

    def __init__(self, file: ProblemFile, kept: Sequence[int], seed: tuple[int, ...]) -> None:
        self.file = file
        self.kept = array("Q", kept)
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._make_order)

    def at(self, index: int) -> Problem:
        epoch, place = divmod(index, len(self.kept))
        return self.file[self.kept[self._order(epoch)[place]]]

    def _make_order(self, epoch: int) -> array[int]:
        order = array("Q", range(len(self.kept)))
        seed, *more = self._seed
        random.Random(stable_hash("epoch", seed, epoch, *more)).shuffle(order)  # type: ignore[arg-type]
        return order


def file_for_turn(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """(which of several files has turn `position`, how many turns it had before).

    The first file has had floor(position x its share) turns, the others share what is left in the
    same way: at every position each is within one turn of its share, or of its share of the rest.
    """
    left = position
    total = sum(weights, Fraction(0))
    for number, weight in enumerate(weights[:-1]):
        before, after = int(left * weight / total), int((left + 1) * weight / total)
        if after > before:
            return number, before
        left -= before
        total -= weight
    return len(weights) - 1, left


class FileProblems:
    """Implements `ProblemSource`. `elsewhere`: keys of problems that are evaluated on."""

    def __init__(
        self,
        config: DataConfig,
        elsewhere: Collection[int] = (),
        prompts: PromptRenderer | None = None,
    ) -> None:
        self.name = "files"
        self._config = config
        sources = config.files()
        setting = "task.sources" if config.sources else "task.path"
        how = (setting, config.prompt_template, config.bad_rows, prompts)
        self._files = [ProblemFile(source, *how) for source in sources]
        self._weights = [Fraction(str(source.weight)) for source in sources]
        training: list[list[int]] = [[] for _ in sources]
        heldout: dict[int, tuple[int, int]] = {}
        excluded = frozenset(elsewhere)
        for number, file in enumerate(self._files):
            for index, key in enumerate(file.keys):
                if key in excluded:
                    continue
                if is_heldout_key(key, config.heldout_share):
                    heldout[key] = (number, index)
                else:
                    training[number].append(index)
        self._epochs = [self._epochs_of(number, rows) for number, rows in enumerate(training)]
        self._heldout = list(heldout.values())
        random.Random(stable_hash("held-out order", HELDOUT_SEED)).shuffle(self._heldout)

    def summary(self) -> str:
        """The rows to train on and those held out."""
        parts = [
            f"{len(epochs.kept):,} of {len(epochs.file):,} rows of {epochs.file.what}"
            for epochs in self._epochs
        ]
        return f"{', '.join(parts)} to train on, {len(self._heldout):,} different ones held out"

    def _epochs_of(self, number: int, kept: Sequence[int]) -> _Epochs:
        file = self._files[number]
        if not kept:
            raise UserError(
                f"{file.what} has no training problem left of {len(file)} at "
                f"task.heldout_share {self._config.heldout_share}"
            )
        seed = self._config.train_seed
        return _Epochs(file, kept, (seed, number) if number else (seed,))

    def train(self, index: int) -> Problem:
        """Problem `index` of an endless run of shuffled epochs."""
        number, place = file_for_turn(index, self._weights)
        return self._epochs[number].at(place)

    def counts(self, heldout: int) -> tuple[int, int]:
        """Number of training problems, and of those held out, at most `heldout`."""
        return sum(len(epochs.kept) for epochs in self._epochs), min(len(self._heldout), heldout)

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` held-out problems; 0: all. Raises UserError if there are fewer."""
        if len(self._heldout) < count:
            raise UserError(
                f"{self._files[0].what} has only {len(self._heldout)} held-out problems at "
                f"task.heldout_share {self._config.heldout_share}, eval.prompts asks for {count}: "
                "lower eval.prompts, raise the share, or evaluate on eval.sets"
            )
        return [self._files[number][index] for number, index in self._heldout[: count or None]]

    def problems_longer_than(self, size: int) -> Iterator[tuple[ProblemLocation, Problem]]:
        """Problems of both sides whose texts have more bytes than `size`."""
        for number, file in enumerate(self._files):
            for index, bytes_ in enumerate(file.sizes):
                if bytes_ > size:
                    yield (number, index), file[index]

    def exclude(self, places: Collection[ProblemLocation]) -> None:
        """Neither train nor evaluate on those that `longer` gave these places."""
        gone = set(places)
        self._epochs = [
            self._epochs_of(n, [i for i in epochs.kept if (n, i) not in gone])
            for n, epochs in enumerate(self._epochs)
        ]
        self._heldout = [place for place in self._heldout if place not in gone]

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """Rows of prompts and answers have none."""
        raise UserError(
            f"{self._files[0].what} holds no worked answers; set sft.data to a file with `prompt` "
            "and `response`, or `messages`"
        )

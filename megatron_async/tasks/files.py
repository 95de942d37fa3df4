"""Provides problems from files: which rows are trained on, in which order, and which are held out.

Invariants
- Every row is read once before anything starts; an error about bad rows lists them by file, line
  and column.
- The settings and the files alone decide which row is at a position: a run that is restored at a
  position asks what an uninterrupted run would have asked.
- Training goes through each file epoch by epoch: each epoch has every training row once, in an
  order that depends only on `train_seed`, the epoch and the file's number. Files alternate by their
  weights, and each file advances independently.
- Rows with equal problems are either all trained on or all held out, and a problem of an evaluation
  set is never trained on, because the decision follows from the problem's text.
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
from megatron_async.tasks.index_cache import MIN_CACHED_ROWS, Index, cached_index
from megatron_async.tasks.layouts import Columns, value_at
from megatron_async.tasks.prompts import PromptRenderer
from megatron_async.tasks.rows import MAX_BAD_ROWS_SHOWN, open_rows, report_bad_rows

# Number of bytes assumed for what a chat template writes around one message, such as its role.
# Templates write less, so that the size of a prompt is not underestimated.
_MESSAGE_BYTES = 64


class ProblemFile:
    """The problems of one file, each read from disk when requested.

    Memory holds an index of about 50 bytes per row.

    Args:
        file: Path, columns and row filter of the file.
        setting: Name of the setting that has the file, for error messages.
        template: The prompt template; empty to use the template of the file's layout.
        mode: Value of `task.bad_rows`. With "skip", rows that cannot be used are left out with a
            warning; with "refuse", they raise a UserError.
        prompts: If given, renders each row as a prompt; a row that cannot be rendered cannot be
            used.
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
        large = len(self._rows) >= MIN_CACHED_ROWS
        make = partial(self._index, file)
        state = template if prompts is None else f"{template}\n{prompts.identity()}"
        index = cached_index(file, state, make) if large else make()
        self.places, self.keys, self.sizes = index
        if 0 in self.sizes:
            self._report_bad(mode)
            good = [number for number, size in enumerate(self.sizes) if size]
            columns = (array("Q", map(column.__getitem__, good)) for column in index)
            self.places, self.keys, self.sizes = columns

    def _index(self, file: FileConfig) -> Index:
        """Read every row and return the row numbers, keys and sizes of the problems.

        Rows that the file's filter excludes have no entry. A row that cannot be used has size 0.
        """
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
            raise UserError(f"{self.what} has no row that matches the filter {file.filter}")
        return places, keys, sizes

    def _report_bad(self, mode: str) -> None:
        """Report the unusable rows, by a warning or a UserError (see `report_bad_rows`)."""
        places = [p for p, size in zip(self.places, self.sizes, strict=True) if not size]
        found = [self._rows.where(place) for place in places]
        problems = 0
        for number, place in enumerate(places[:MAX_BAD_ROWS_SHOWN]):
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
        """Return the number of usable problems."""
        return len(self.places)

    def __getitem__(self, index: int) -> Problem:
        """Read problem `index` from the file.

        Raises:
            UserError: If the problem is another one than when the file was indexed.
        """
        where = self.where(index)
        problem = self._columns.problem(self._rows[self.places[index]], where)
        if problem.key != self.keys[index]:
            raise UserError(f"{where} has changed since the file was indexed at the start")
        return problem

    def where(self, index: int) -> str:
        """Return file and line (or row) of problem `index`, for an error message."""
        return self._rows.where(self.places[index])

    def first(self, count: int, seed: int) -> list[Problem]:
        """Return the first `count` different problems of a shuffled order; all if `count` is 0.

        The order depends on `seed` only.

        Raises:
            UserError: If the file has fewer different problems.
        """
        indices = list(dict(zip(self.keys, range(len(self)), strict=True)).values())
        if count > len(indices):
            raise UserError(
                f"{self.what} holds {len(indices)} different problems; {count} are requested. "
                "Lower the set's `prompts`."
            )
        random.Random(stable_hash("evaluation order", seed)).shuffle(indices)
        return [self[index] for index in indices[: count or None]]


def _size(problem: Problem, named: Collection[str]) -> int:
    """Return an upper estimate of the number of bytes that a problem's texts need in its prompt.

    Args:
        problem: The problem. `_MESSAGE_BYTES` are added for each of its chat messages, for what a
            chat template writes around it.
        named: Names of the problem's fields that its prompt template uses.
    """
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
    """Endless order of one file's training problems that is shuffled differently in each epoch.

    An epoch is one pass over all training problems. `kept` has their indices in the file.
    """

    def __init__(self, file: ProblemFile, kept: Sequence[int], seed: tuple[int, ...]) -> None:
        self.file = file
        self.kept = array("Q", kept)
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._make_order)

    def at(self, index: int) -> Problem:
        """Return problem `index` of the endless order."""
        epoch, place = divmod(index, len(self.kept))
        return self.file[self.kept[self._order(epoch)[place]]]

    def _make_order(self, epoch: int) -> array[int]:
        """Return the order of the training problems in the given epoch."""
        order = array("Q", range(len(self.kept)))
        seed, *more = self._seed
        random.Random(stable_hash("epoch", seed, epoch, *more)).shuffle(order)  # type: ignore[arg-type]
        return order


def file_for_turn(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Return which file is read at `position`, and how many earlier positions read that file.

    The files take turns in proportion to their weights. Among the first p positions, the first
    file gets floor(p * weight / sum of all weights). The other files divide the remaining positions
    in the same way among themselves, and so on. So no file is ever a whole position away from its
    share of the positions that the files before it leave.

    Args:
        position: Position in the joint order of all files, counted from 0.
        weights: Weight of each file.

    Returns:
        The index of the file, and the number of earlier positions that read it.
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
    """Problem source that reads training and held-out problems from files; see `ProblemSource`.

    Args:
        config: The settings under `task`.
        elsewhere: Keys (`Problem.key`) of problems in evaluation sets, which are never trained on.
        prompts: If given, rows that it cannot render as prompts count as bad rows, which
            `task.bad_rows` refuses or skips.
    """

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
        self._files = [
            ProblemFile(source, setting, config.prompt_template, config.bad_rows, prompts)
            for source in sources
        ]
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
        """Return a message that counts each file's training rows and the held-out problems."""
        parts = [
            f"{len(epochs.kept):,} of {len(epochs.file):,} rows of {epochs.file.what}"
            for epochs in self._epochs
        ]
        return f"{', '.join(parts)} to train on, {len(self._heldout):,} different ones held out"

    def _epochs_of(self, number: int, kept: Sequence[int]) -> _Epochs:
        """Return the endless training order of file `number`, limited to the problems `kept`.

        `kept` lists indices of problems in the file.

        Raises:
            UserError: If `kept` is empty.
        """
        file = self._files[number]
        if not kept:
            raise UserError(
                f"{file.what} has no training problem left of {len(file)}: all are held out "
                f"(task.heldout_share is {self._config.heldout_share}), in an evaluation set, or "
                "removed as too long (task.long_prompts)"
            )
        seed = self._config.train_seed
        return _Epochs(file, kept, (seed, number) if number else (seed,))

    def train(self, index: int) -> Problem:
        """Return training problem `index` of an endless order, in which the files take turns in
        proportion to their weights."""
        number, place = file_for_turn(index, self._weights)
        return self._epochs[number].at(place)

    def counts(self, heldout: int) -> tuple[int, int]:
        """Return the number of training problems, and of held-out problems up to `heldout`."""
        return sum(len(epochs.kept) for epochs in self._epochs), min(len(self._heldout), heldout)

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` held-out problems; all of them if `count` is 0.

        Raises:
            UserError: If there are fewer.
        """
        if len(self._heldout) < count:
            raise UserError(
                f"{self._files[0].what} has only {len(self._heldout)} held-out problems at "
                f"task.heldout_share {self._config.heldout_share}; eval.prompts is {count}. "
                "Lower eval.prompts, raise the share, or evaluate on eval.sets."
            )
        return [self._files[number][index] for number, index in self._heldout[: count or None]]

    def problems_longer_than(self, size: int) -> Iterator[tuple[ProblemLocation, Problem]]:
        """Yield each training or held-out problem with more than `size` bytes, with its location.

        The location is a pair: the index of the file and the index of the problem in the file.
        """
        for number, file in enumerate(self._files):
            for index, bytes_ in enumerate(file.sizes):
                if bytes_ > size:
                    yield (number, index), file[index]

    def exclude(self, places: Collection[ProblemLocation]) -> None:
        """Remove problems from training and evaluation, given their locations.

        `problems_longer_than` returns such locations.

        Raises:
            UserError: If a file has no training problem left.
        """
        removed = set(places)
        self._epochs = [
            self._epochs_of(n, [i for i in epochs.kept if (n, i) not in removed])
            for n, epochs in enumerate(self._epochs)
        ]
        self._heldout = [place for place in self._heldout if place not in removed]

    def worked(self, count: int) -> list[tuple[Problem, str]]:
        """Raise a UserError, because files of prompts and answers have no worked answers."""
        raise UserError(
            f"{self._files[0].what} holds no worked answers; set sft.data to a file with `prompt` "
            "and `response`, or `messages`"
        )

"""Reads, draws and fits the response lengths of simulated groups, and draws their rewards.

Lengths and rewards do not depend on the schedule, so that schedules can be compared. Lengths are
drawn from a distribution or from recorded lengths. Those are in a run directory, in a file that a
run has exported, or in a file of another program. Such a file is a JSON list, or has one number per
line, or is JSONL whose objects have `response_length`, `response_ids` or `segments` (the lines of
`export/trajectories.jsonl`; tokens that the environment wrote are not counted). If an object has
`finish_reason`, the value `length` marks a response that was cut at the length limit, and null
marks a response that never ended, because its trajectory was dropped before.

`fit_lengths` fits long-tailed distributions to recorded lengths by maximum likelihood. If a
response was cut or dropped before its end, only a lower bound of its length is known. Such a
length is censored: it enters the likelihood by the survival function (the probability of a greater
length). If censored lengths were treated as complete, the fitted tail would be too short, and the
tail determines how much asynchronous schedules gain.

Invariants
- Group g of a seed always has the same lengths and rewards, whatever other groups were drawn
  before.
- Lengths are integers in 1..`longest`.
- The lengths of responses to the same prompt are correlated by a Gaussian copula. For response i,
  z_i = sqrt(rho) * z_prompt + sqrt(1 - rho) * e_i, where z_prompt and e_i are standard normal
  values and rho is `simulate.lengths.prompt_correlation`. The length is the quantile of the length
  distribution at Phi(z_i), where Phi is the standard normal distribution function. So each length
  by itself has the chosen distribution.
- Lines are read one by one and only their lengths are kept, because an export may be larger than
  the memory. Only a JSON list is read as a whole.
- In the export of a run, the lines that were written after the last committed removal from the
  database are ignored, because a running or killed run may have left an incomplete line there.
- A fit is a pure function of lengths and flags.
- Fits have the parameters of `simulate.lengths`: median and sigma of a log-normal distribution,
  scale and shape of a Weibull distribution.
"""

import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_async.config.files import parse_json
from megatron_async.config.simulate import LengthConfig, SimulatedRewardConfig
from megatron_async.errors import UserError, short_repr
from megatron_async.run_directory import RunDirectory
from megatron_async.store import export
from megatron_async.store.location import has_store
from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.types import FinishReason

MEDIAN_SHARE = 0.25
"""Default median length of responses, as a share of the longest possible response."""
WEIBULL_SHARE = 1 / 3
"""Default scale of the Weibull distribution, as a share of the longest possible response."""
_LONGEST = 1e15
"""Largest accepted length in tokens. Floats above 2**53 (about 9e15) cannot represent every
integer."""
Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Recorded:
    """Recorded response lengths, with two flags for each response; all arrays have the shape [n].

    A response that was cut at the length limit has ended. A response that was dropped before its
    end has not. Both are censored: without the cut or drop, they would have been longer.

    Attributes:
        lengths: Lengths in tokens.
        censored: Whether the response was cut or dropped.
        ended: Whether the response ended, complete or cut.
    """

    lengths: Array
    censored: Flags
    ended: Flags

    def cut_at(self, limit: float) -> "Recorded":
        """Return these lengths as if every response of `limit` tokens or more had been cut at
        `limit` tokens."""
        reached = self.lengths >= limit
        return Recorded(
            np.minimum(self.lengths, limit), self.censored | reached, self.ended | reached
        )


def read_lengths(path: Path) -> Array:
    """Read the lengths in tokens of the responses that ended, from the file or run directory
    `path`.

    Raises:
        UserError: The file cannot be used; the message names the file and the entry.
    """
    sample = read_recorded(path, "simulate.lengths.path")
    if not sample.ended.any():
        raise UserError(f"simulate.lengths.path {path} has no response that ended")
    return sample.lengths[sample.ended]


def read_recorded(path: Path, setting: str) -> Recorded:
    """Read all response lengths in the file or run directory `path`; skip unfinished responses
    without tokens.

    Args:
        path: The file or directory.
        setting: Name of the setting or argument that named `path`, for error messages.

    Raises:
        UserError: The file cannot be used; the message names the setting, the file and the entry.
    """
    if path.is_dir():
        return _of_run(path, setting)
    lengths, censored, ended = array("d"), bytearray(), bytearray()
    for number, entry in enumerate(_entries(path, setting), start=1):
        (tokens, shown), ending = _length(entry), _ending(entry)
        unstarted = tokens == 0 and ending is None
        if tokens is None or not (tokens >= 1 or unstarted):
            raise UserError(f"{setting} {path}: entry {number} is not a length: {shown}")
        if not unstarted:
            lengths.append(tokens)
            censored.append(ending in (None, "length"))
            ended.append(ending is not None)
    if not lengths:
        raise UserError(f"{setting} {path} has no length of a response")
    return Recorded(
        np.array(lengths), np.array(censored).astype(bool), np.array(ended).astype(bool)
    )


def _of_run(path: Path, setting: str) -> Recorded:
    """Read the response lengths of a run from its store and its export.

    Raises:
        UserError: The run has no response yet.
    """
    directory, _ = RunDirectory.find(path, [], setting)
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        found = [s for s in (*reader.summaries(), *export.summaries(reader)) if s.tokens]
    if not found:
        raise UserError(f"{setting} {path}: the run has not generated any response yet")
    ended = np.array([s.finish_reason is not None for s in found])
    cut = np.array([s.finish_reason is FinishReason.LENGTH for s in found])
    return Recorded(np.array([float(s.tokens) for s in found]), cut | ~ended, ended)


def _entries(path: Path, setting: str) -> Iterator[Any]:
    committed, position, seen = _committed_bytes(path), 0, False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                position += len(line)
                if position > committed:
                    return
                if not line.strip():
                    continue
                is_list, seen = not seen and line.lstrip().startswith(b"["), True
                where = "" if is_list else f", line {number},"
                found = _parsed(line + file.read() if is_list else line, f"{setting} {path}{where}")
                if is_list:
                    yield from found
                    return
                yield found
    except OSError as error:
        run = path.absolute().parent.parent
        hint = ""
        if RunDirectory(run).config_file.exists():
            hint = f"; the run has exported nothing yet. Name its directory instead: {run}"
        raise UserError(f"{setting} {path} cannot be read: {error.strerror}{hint}") from error


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_json(text.decode(), where)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text: {error}") from error


def _committed_bytes(path: Path) -> float:
    """Return the number of bytes of file `path` that may be read: those before the last committed
    removal if the file is the export of a run, otherwise infinity."""
    store = RunDirectory(path.absolute().parent.parent).store_file
    if not has_store(store):
        return math.inf
    with closing(StoreReader(store)) as reader:
        return reader.exported().bytes if reader.export_file == path.absolute() else math.inf


def _length(entry: Any) -> tuple[float | None, object]:
    """Return the number of tokens that the policy generated in an entry (a line or list element) of
    a file with lengths, and the value that an error message shows for the entry.

    The number is None if the entry has no valid length.
    """
    found = entry
    if isinstance(entry, dict):
        known = [(name, count) for name, count in _FORMS.items() if name in entry]
        if not known:
            return None, f"the object has none of the keys {', '.join(_FORMS)}"
        name, count = known[0]
        found = count(entry[name])
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None, found
    return (float(found) if abs(found) < _LONGEST else None), short_repr(found)


def _ending(entry: Any) -> str | None:
    return entry.get("finish_reason", "stop") if isinstance(entry, dict) else "stop"


def _of_segments(value: Any) -> Any:
    try:
        return sum(len(s["token_ids"]) for s in value if not s["from_environment"])
    except (TypeError, KeyError):
        return f"segments {str(value)[:80]}"


_FORMS: dict[str, Callable[[Any], Any]] = {
    "response_length": lambda value: value,
    "response_ids": lambda value: len(value) if isinstance(value, list) else value,
    "segments": _of_segments,
}


_BLOCK = 1024
"""Number of groups that are drawn at once."""


class GroupSource:
    """Draws response lengths and rewards of each group from the random seed of a run."""

    def __init__(
        self,
        lengths: LengthConfig,
        reward: SimulatedRewardConfig,
        *,
        group_size: int,
        longest: int,
        seed: int,
    ) -> None:
        """Prepare to draw groups.

        Args:
            lengths: Distribution of response lengths.
            reward: Distribution of rewards.
            group_size: Number of responses of a group.
            longest: Maximum number of tokens of a response.
            seed: Random seed.

        Raises:
            UserError: A length file cannot be used.
        """
        self._reward = reward
        self._correlation = lengths.prompt_correlation
        self._size = group_size
        self._longest = longest
        self._seed = seed
        self._length_at = length_at_score(lengths, longest)
        self._blocks: dict[int, tuple[list[list[int]], list[list[float]]]] = {}

    def group(self, number: int) -> tuple[list[int], list[float]]:
        """Return the lengths in tokens and the rewards (0 or 1) of the members of group
        `number`."""
        block, index = divmod(number, _BLOCK)
        if block not in self._blocks:
            # Groups are requested in order, so blocks of groups before this one are not needed
            # again.
            self._blocks = {block: self._draw(block)}
        lengths, rewards = self._blocks[block]
        return lengths[index], rewards[index]

    def _draw(self, block: int) -> tuple[list[list[int]], list[list[float]]]:
        rng = np.random.default_rng([self._seed, block])
        shape = (_BLOCK, self._size)
        rho = self._correlation
        z = math.sqrt(rho) * rng.standard_normal((_BLOCK, 1))
        z = z + math.sqrt(1 - rho) * rng.standard_normal(shape)
        lengths = np.clip(np.rint(self._length_at(z)), 1, self._longest).astype(np.int64)
        rates = rng.beta(self._reward.success_alpha, self._reward.success_beta, (_BLOCK, 1))
        rewards = (rng.random(shape) < rates).astype(np.float64)
        return lengths.tolist(), rewards.tolist()


def length_at_score(config: LengthConfig, longest: int) -> Callable[[Array], Array]:
    """Return the function from standard normal values z to response lengths in tokens, before they
    are cut at `longest`.

    The length is the quantile of the length distribution at Phi(z), where Phi is the standard
    normal distribution function.

    Args:
        config: The length distribution.
        longest: `sampling.max_new_tokens`, from which a median or scale that is not set is derived.
    """
    median = config.median or MEDIAN_SHARE * longest
    if config.distribution == "constant":
        return lambda z: np.full_like(z, median)
    if config.distribution == "weibull":
        scale = config.scale or WEIBULL_SHARE * longest
        return lambda z: scale * (-np.log(_normal_cdf(-z))) ** (1 / config.shape)
    if config.distribution == "uniform":
        largest = config.scale or longest
        return lambda z: 0.5 + largest * _normal_cdf(z)
    if config.distribution == "file":
        recorded = np.sort(read_lengths(Path(config.path)))
        return lambda z: recorded[(_normal_cdf(z) * (len(recorded) - 1e-9)).astype(int)]
    return lambda z: median * np.exp(config.sigma * z)


def _normal_cdf(z: Array) -> Array:
    return 0.5 * np.asarray(np.vectorize(math.erfc)(-z / math.sqrt(2.0)), dtype=np.float64)


_SMALLEST_SAMPLE = 10
"""Smallest number of responses that ended without being cut with which a fit is made."""
_MAX_EXTRAPOLATED = 10.0
"""Largest accepted ratio of the fitted median to the longest recorded response. A larger one means
that nearly all responses were cut, so that the data do not determine the distribution."""


@dataclass(frozen=True)
class Fit:
    """Distribution family fitted to recorded lengths.

    Attributes:
        distribution: Name of the family.
        settings: Its parameters, named as settings of `simulate.lengths`.
        log_likelihood: Log-likelihood of the recorded lengths; comparable between fits of the same
            lengths.
        distance: Largest difference between the fitted distribution function and the product-limit
            estimate (Kaplan-Meier) of the recorded lengths' distribution function.
    """

    distribution: str
    settings: dict[str, float]
    log_likelihood: float
    distance: float


def fit_lengths(sample: Recorded) -> list[Fit]:
    """Fit a log-normal and a Weibull distribution to recorded lengths; return both fits, the more
    likely one first.

    Raises:
        UserError: The lengths do not determine a fit.
    """
    whole = sample.lengths[~sample.censored]
    if len(whole) < _SMALLEST_SAMPLE:
        raise UserError(
            f"cannot fit lengths: {len(whole)} of {len(sample.lengths)} responses ended without "
            f"being cut; at least {_SMALLEST_SAMPLE} are needed"
        )
    if whole.min() == whole.max():
        raise UserError(
            f"cannot fit lengths: all {len(whole)} responses that ended without being cut have "
            f"{whole[0]:g} tokens. Use simulate.lengths.distribution: constant"
        )
    from scipy import stats  # Imported here, because the import takes most of a second.

    logs, largest = np.log(whole), float(sample.lengths.max())
    data = stats.CensoredData.right_censored(sample.lengths / largest, sample.censored)
    start = float(np.exp(logs.mean())) / largest
    sigma, _, median = stats.lognorm.fit(data, float(logs.std()), floc=0, scale=start)
    shape, _, scale = stats.weibull_min.fit(data, 1.0, floc=0, scale=start)
    if median > _MAX_EXTRAPOLATED:
        raise UserError(
            f"cannot fit lengths: {int(sample.censored.sum())} of {len(sample.lengths)} responses "
            "were cut or never ended, so that the fitted median is more than "
            f"{_MAX_EXTRAPOLATED:g} times the longest recorded response"
        )
    median, scale = median * largest, scale * largest
    lognormal, weibull = stats.lognorm(sigma, scale=median), stats.weibull_min(shape, scale=scale)
    fits = [
        _fit("lognormal", {"median": median, "sigma": sigma}, sample, lognormal),
        _fit("weibull", {"scale": scale, "shape": shape}, sample, weibull),
    ]
    return sorted(fits, key=lambda fit: -fit.log_likelihood)


def _fit(family: str, settings: dict[str, float], sample: Recorded, fitted: Any) -> Fit:
    """Compute the log-likelihood and the distance of a fitted distribution to the recorded
    lengths."""
    from scipy import stats

    likelihood = fitted.logpdf(sample.lengths[~sample.censored]).sum()
    likelihood += fitted.logsf(sample.lengths[sample.censored]).sum()
    estimate = stats.ecdf(stats.CensoredData.right_censored(sample.lengths, sample.censored)).cdf
    after = estimate.probabilities
    before = np.concatenate([[0.0], after[:-1]])
    at_step = fitted.cdf(estimate.quantiles)
    gaps = np.maximum(np.abs(at_step - after), np.abs(at_step - before))[after > before]
    return Fit(family, settings, float(likelihood), float(gaps.max()))

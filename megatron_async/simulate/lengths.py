"""Response lengths and rewards of simulated groups, drawn once and the same for every schedule.

Lengths are drawn from a distribution, or recorded: in a run directory, or in a file of an export
or another program. Such a file is a JSON list, one number a line, or JSONL whose objects hold
`response_length`, `response_ids`, or `segments` (the lines of `export/trajectories.jsonl`: tokens
that the environment wrote are not counted). Where an object has `finish_reason`, `length` is a
response that was cut, and null is one that never ended (it was dropped before).

`fit_lengths` fits long-tailed distributions to recorded lengths, by maximum likelihood. A response
that was cut (or dropped before its end) shows only that it would have been longer: it
is censored, and enters the likelihood by its survival function. Taken at face value, cut responses
would make the tail, which is what asynchrony is about, look short.

Invariants
- Group number g of a seed always has the same lengths and rewards, whatever was asked before.
- Lengths are integers in 1..`longest`.
- Correlation within a prompt comes from a Gaussian copula: z_i = sqrt(rho) z_prompt +
  sqrt(1 - rho) z_i', and a length is the distribution's quantile at Phi(z_i), so that every
  distribution keeps its marginal.
- Lines are read one by one and only their lengths are kept: an export may be larger than the
  memory. (A JSON list is read whole.)
- Of a run's own export, what is behind the last committed removal is left out, as a run that goes
  on, or one that was killed, may have a torn line there.
- A fit is pure: lengths and flags in, parameters out; the same data give the same fits.
- Both families are fitted as they are drawn from here: log-normal by median and sigma, Weibull by
  scale and shape.
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
"""Median of the responses over the longest one, where it is not set."""
WEIBULL_SHARE = 1 / 3
"""Scale of Weibull's distribution over the longest response, where it is not set."""
_LONGEST = 1e15  # tokens; beyond it floats skip whole numbers
Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Recorded:
    """Lengths in tokens, whether the response would have been longer, and whether it ended, [n].

    What was cut at the length limit has ended; what was dropped before has not. Both would have
    been longer.
    """

    lengths: Array
    censored: Flags
    ended: Flags

    def cut_at(self, limit: float) -> "Recorded":
        """The same when every response of `limit` tokens or more was cut there."""
        reached = self.lengths >= limit
        return Recorded(
            np.minimum(self.lengths, limit), self.censored | reached, self.ended | reached
        )


def read_lengths(path: Path) -> Array:
    """Read lengths of responses that ended. Raises UserError naming the file and the entry."""
    sample = read_recorded(path, "simulate.lengths.path")
    if not sample.ended.any():
        raise UserError(f"simulate.lengths.path {path} holds no response that ended")
    return sample.lengths[sample.ended]


def read_recorded(path: Path, setting: str) -> Recorded:
    """All lengths of a file. Raises UserError naming the setting, the file and the entry.

    An unfinished response without any token is left out.
    """
    if path.is_dir():
        return _of_run(path, setting)
    lengths, censored, ended = array("d"), bytearray(), bytearray()
    for number, entry in enumerate(_entries(path, setting), start=1):
        (tokens, short_repr), ending = _length(entry), _ending(entry)
        unstarted = tokens == 0 and ending is None
        if tokens is None or not (tokens >= 1 or unstarted):
            raise UserError(f"{setting} {path}: entry {number} is not a length: {short_repr}")
        if not unstarted:
            lengths.append(tokens)
            censored.append(ending in (None, "length"))
            ended.append(ending is not None)
    if not lengths:
        raise UserError(f"{setting} {path} holds no length")
    return Recorded(
        np.array(lengths), np.array(censored).astype(bool), np.array(ended).astype(bool)
    )


def _of_run(path: Path, setting: str) -> Recorded:
    """Read the responses in a run's store and in its export. UserError when there are none."""
    directory, _ = RunDirectory.find(path, [], setting)
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        found = [s for s in (*reader.summaries(), *export.summaries(reader)) if s.tokens]
    if not found:
        raise UserError(f"{setting} {path}: the run has no response yet")
    ended = np.array([s.finish_reason is not None for s in found])
    cut = np.array([s.finish_reason is FinishReason.LENGTH for s in found])
    return Recorded(np.array([float(s.tokens) for s in found]), cut | ~ended, ended)


def _entries(path: Path, setting: str) -> Iterator[Any]:
    committed, place, seen = _committed_bytes(path), 0, False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place += len(line)
                if place > committed:
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
            hint = f"; the run has exported nothing yet, name its directory instead: {run}"
        raise UserError(f"{setting} {path} cannot be read: {error.strerror}{hint}") from error


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_json(text.decode(), where)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text: {error}") from error


def _committed_bytes(path: Path) -> float:
    """Return how far `path` may be read: no limit, unless it is the export of a run."""
    store = RunDirectory(path.absolute().parent.parent).store_file
    if not has_store(store):
        return math.inf
    with closing(StoreReader(store)) as reader:
        return reader.exported().bytes if reader.export_file == path.absolute() else math.inf


def _length(entry: Any) -> tuple[float | None, object]:
    """The tokens that were generated (None: this is no length), and what a refusal shows."""
    found = entry
    if isinstance(entry, dict):
        known = [(name, count) for name, count in _FORMS.items() if name in entry]
        if not known:
            return None, f"it has none of {', '.join(_FORMS)}"
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


class GroupSource:
    """Groups in order; `lengths(g)` and `rewards(g)` have one entry per member."""

    def __init__(
        self,
        lengths: LengthConfig,
        reward: SimulatedRewardConfig,
        *,
        group_size: int,
        longest: int,
        seed: int,
    ) -> None:
        """`longest` cuts responses. Raises UserError when a length file cannot be used."""
        self._reward = reward
        self._correlation = lengths.prompt_correlation
        self._size = group_size
        self._longest = longest
        self._seed = seed
        self._length_at = length_at_score(lengths, longest)
        self._blocks: dict[int, tuple[list[list[int]], list[list[float]]]] = {}

    def group(self, number: int) -> tuple[list[int], list[float]]:
        """Lengths in tokens and rewards (0 or 1) of group `number`."""
        block, place = divmod(number, _BLOCK)
        if block not in self._blocks:
            self._blocks = {block: self._draw(block)}  # groups are asked for in order
        lengths, rewards = self._blocks[block]
        return lengths[place], rewards[place]

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
    """Return the function from a standard normal's z to the uncut length of that quantile.

    Args:
        longest: `sampling.max_new_tokens`, from which a median or scale that is not set follows.
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
_MOST_EXTRAPOLATED = 10.0  # fitted median over the longest response of a sample


@dataclass(frozen=True)
class Fit:
    """A fitted family; `settings` are those of `simulate.lengths` besides `distribution`.

    `log_likelihood` is comparable between the fits of one sample. `distance` is the largest
    difference between the fitted distribution function and the product-limit estimate
    (Kaplan-Meier) of the sample's.
    """

    distribution: str
    settings: dict[str, float]
    log_likelihood: float
    distance: float


def fit_lengths(sample: Recorded) -> list[Fit]:
    """The families, the more likely one first. Raises UserError for a sample without a fit."""
    whole = sample.lengths[~sample.censored]
    if len(whole) < _SMALLEST_SAMPLE:
        raise UserError(
            f"lengths cannot be fitted to {len(whole)} responses that ended by themselves "
            f"(of {len(sample.lengths)}); at least {_SMALLEST_SAMPLE} are needed"
        )
    if whole.min() == whole.max():
        raise UserError(
            f"lengths cannot be fitted: all {len(whole)} responses that ended by themselves have "
            f"{whole[0]:g} tokens; use simulate.lengths.distribution constant"
        )
    from scipy import stats  # its import takes most of a second

    logs, largest = np.log(whole), float(sample.lengths.max())
    data = stats.CensoredData.right_censored(sample.lengths / largest, sample.censored)
    start = float(np.exp(logs.mean())) / largest
    sigma, _, median = stats.lognorm.fit(data, float(logs.std()), floc=0, scale=start)
    shape, _, scale = stats.weibull_min.fit(data, 1.0, floc=0, scale=start)
    if median > _MOST_EXTRAPOLATED:
        raise UserError(
            f"lengths cannot be fitted: {int(sample.censored.sum())} of {len(sample.lengths)} "
            "responses were cut, which is too many"
        )
    median, scale = median * largest, scale * largest
    lognormal, weibull = stats.lognorm(sigma, scale=median), stats.weibull_min(shape, scale=scale)
    fits = [
        _fit("lognormal", {"median": median, "sigma": sigma}, sample, lognormal),
        _fit("weibull", {"scale": scale, "shape": shape}, sample, weibull),
    ]
    return sorted(fits, key=lambda fit: -fit.log_likelihood)


def _fit(family: str, settings: dict[str, float], sample: Recorded, fitted: Any) -> Fit:
    """Compare a fitted distribution with the sample."""
    from scipy import stats

    likelihood = fitted.logpdf(sample.lengths[~sample.censored]).sum()
    likelihood += fitted.logsf(sample.lengths[sample.censored]).sum()
    estimate = stats.ecdf(stats.CensoredData.right_censored(sample.lengths, sample.censored)).cdf
    after = estimate.probabilities
    before = np.concatenate([[0.0], after[:-1]])
    at_step = fitted.cdf(estimate.quantiles)
    gaps = np.maximum(np.abs(at_step - after), np.abs(at_step - before))[after > before]
    return Fit(family, settings, float(likelihood), float(gaps.max()))

"""Parses the threshold notations of the rollout correction.

`2.0` is an upper bound. `"0.5_2.0"` is a lower and an upper bound. In YAML, write both numbers with
a decimal point, or quote the value, because YAML reads 0.5_2 without quotes as the number 0.52.
"""

import math
from dataclasses import dataclass
from typing import Final

REJECTION_OPTIONS: Final = tuple(
    f"{level}_{divergence}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for divergence in ("k1", "k2", "k3")
    if (level, divergence) != ("seq_max", "k1")
)
REJECTION_ALIASES: Final[dict[str, str]] = {"sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@dataclass(frozen=True)
class ParsedRejection:
    """A parsed rejection rule: a token passes if the divergence (k1, k2 or k3) at this level lies
    between `lower` and `upper`. For k1, the bounds are the logarithms of the two numbers in the
    threshold. For k2 and k3, `lower` is -inf."""

    option: str
    level: str
    divergence: str
    lower: float
    upper: float


def parse_weight_threshold(spec: float | str, name: str) -> tuple[float | None, float]:
    """Parse a threshold of importance weights, such as 2.0 or "0.5_2.0"; return its lower and upper
    bound.

    Args:
        spec: A number, the upper bound, or a text `low_high` such as `0.5_2` with both bounds.
        name: Name of the setting, for error messages.

    Returns:
        The lower bound (None for a single number) and the upper bound.

    Raises:
        ValueError: If a bound is not a positive number, or the lower one exceeds the upper one.
    """
    low_text, separator, high_text = str(spec).strip().partition("_")
    if not separator:
        low_text, high_text = "", low_text
    try:
        low = float(low_text) if separator else None
        high = float(high_text)
    except ValueError as error:
        raise ValueError(f"{name} must be a number or lo_hi, got {spec!r}") from error
    if not (math.isfinite(high) and high > 0 and (low is None or 0 < low <= high)):
        raise ValueError(f"{name} must be positive with lo <= hi, got {spec!r}")
    return low, high


def parse_rejection(options: str, thresholds: float | str) -> tuple[ParsedRejection, ...]:
    """Parse the rejection rules in `options` and their thresholds, both comma-separated, such as
    "token_k1" and "0.5_2.0".

    There is one threshold for all rules, or one for each rule after duplicate rules were removed.
    For a k1 rule, a single number u means the bounds 1 / u and u.

    Raises:
        ValueError: If a rule or a threshold is invalid.
    """
    given = [part.strip() for part in options.split(",") if part.strip()]
    names = list(dict.fromkeys(REJECTION_ALIASES.get(name, name) for name in given))
    for name in names:
        if name not in REJECTION_OPTIONS:
            known = ", ".join([*REJECTION_OPTIONS, *REJECTION_ALIASES])
            raise ValueError(f"rollout_rs option {name!r} is not one of {known}")
    if not names:
        raise ValueError(f"rollout_rs must name at least one option, got {options!r}")
    specs = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if len(specs) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold {thresholds!r} must have one threshold, or one for each of the "
            f"{len(names)} options of rollout_rs"
        )
    if len(specs) == 1:
        specs = specs * len(names)
    return tuple(_rule(name, spec) for name, spec in zip(names, specs, strict=True))


def _rule(option: str, spec: str) -> ParsedRejection:
    level, _, divergence = option.rpartition("_")
    setting = f"rollout_rs_threshold for {option}"
    low, high = parse_weight_threshold(spec, setting)
    if divergence != "k1":
        if low is not None:
            raise ValueError(f"{setting} is one upper bound, got {spec!r}")
        return ParsedRejection(option, level, divergence, -math.inf, high)
    low = 1.0 / high if low is None else low
    if low > high:
        raise ValueError(f"{setting}: one number u means 1/u_u and must be >= 1, got {spec!r}")
    return ParsedRejection(option, level, divergence, math.log(low), math.log(high))

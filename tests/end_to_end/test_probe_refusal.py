"""Tests that a probe tolerance that engines cannot meet is refused at the start, not after minutes
of replacing engines."""

from __future__ import annotations

import pytest

from megatron_async.config import build_config, load_config
from megatron_async.errors import UserError
from megatron_async.files.package_files import ROOT
from megatron_async.launcher.preflight import check_probe_tolerance


def test_float32_probe_tolerance_is_refused_for_bfloat16_engines() -> None:
    quickstart = ROOT / "configs" / "quickstart.yaml"
    exact = "weights.probe_tolerance=1e-4"
    check_probe_tolerance(load_config(quickstart, [exact, "engines.device=cpu"]))
    in_float32 = ["engines.device=cuda", "engines.dtype=float32"]
    check_probe_tolerance(load_config(quickstart, [exact, *in_float32]))
    refusal = r"weights\.probe_tolerance is 0\.0001.* engines\.dtype auto means bfloat16"
    with pytest.raises(UserError, match=refusal):
        check_probe_tolerance(load_config(quickstart, [exact, "engines.device=cuda"]))
    for tolerance in ([], ["weights.probe_tolerance=0.05"]):
        check_probe_tolerance(load_config(quickstart, ["engines.device=cuda", *tolerance]))


@pytest.mark.parametrize("weights", [{}, {"probe_tolerance": 1e-5, "verify": "never"}])
def test_probe_tolerance_is_accepted_when_default_or_never_verified(
    weights: dict[str, object],
) -> None:
    check_probe_tolerance(build_config({"engines": {"device": "cuda"}, "weights": weights}))

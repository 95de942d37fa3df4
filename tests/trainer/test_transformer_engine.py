"""Tests that layers of Transformer Engine compute the model of a published checkpoint, at every
layout.

The modules of Transformer Engine are stand-ins with the signatures and parameter names of release
2.11; Megatron's specs and wrappers build the layers (tests/trainer/fake_transformer_engine.py). The
tests check how the trainer uses the layers: packed borders, the rotary table, the dummy sequence of
sequence parallelism, the scale of scores, and the attributes by which gradients are summed. They do
not check the kernels of Transformer Engine.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hf_models import random_stream, reference_logprobs, save_hf_model
from tests.trainer import test_model_parity as parity
from tests.trainer.fake_transformer_engine import CASES, EXPERTS, RECOMPUTE, RECOMPUTED, points


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the log-probs of transformers, and for each rank the log-probs and the differences of
    gradients."""
    folder = tmp_path_factory.mktemp("computed")
    ids_T, cu_S1 = random_stream(parity.LENGTHS)
    mask_T = parity.mask_of_responses()
    expected = {}
    for name in CASES:
        model = save_hf_model(name, folder / name)
        expected[name] = reference_logprobs(model, ids_T, cu_S1, parity.TEMPERATURE)[mask_T]
    module = "tests.trainer.fake_transformer_engine"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, folder],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = pickle.loads((folder / "found.pickle").read_bytes())
    return {**found, "transformers": expected}


@pytest.mark.slow
@pytest.mark.parametrize("experts", EXPERTS)
def test_transformer_engine_log_probs_equal_transformers(
    experts: str, computed: dict[str, Any]
) -> None:
    expected = computed["transformers"]
    for case, layout in points(experts):
        last = [rank[case, layout].logprobs_R for rank in computed[experts]]
        last = [logprobs_R for logprobs_R in last if logprobs_R is not None]
        assert len(last) == parity.RANKS // parity.ALL_LAYOUTS[layout].get("pipeline", 1)
        for logprobs_R in last:
            worst = float((logprobs_R - expected[case]).abs().max())
            assert worst < 1e-5, (case, layout)


@pytest.mark.slow
def test_transformer_engine_gradients_equal_those_of_local_layers(computed: dict[str, Any]) -> None:
    expected: set[tuple[Any, ...]] = {("qwen3", "tp2_sp", "none")}
    expected |= {(*point, recompute) for point in RECOMPUTED for recompute in RECOMPUTE}
    for rank in computed["gradients"]:
        assert set(rank) >= expected
        assert max(rank.values()) < 1e-5, rank


def test_parity_stream_has_an_odd_number_of_tokens() -> None:
    """An odd number of tokens is necessary, because otherwise sequence parallelism would not add
    its dummy sequence."""
    assert sum(parity.LENGTHS) % 2

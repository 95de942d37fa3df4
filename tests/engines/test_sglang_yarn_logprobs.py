"""Tests that an engine serves a model with YaRN at its whole context, with the trainer's
log-probs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from megatron_async.config import build_config
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.train_loop.score_rank import score
from megatron_async.weight_sync.verify import EXACT_TOLERANCE
from tests.distributed import run_ranks
from tests.engine import (
    SETTINGS,
    VOCAB,
    EngineUnderTest,
    collect,
    logprobs_of,
    make_request,
    reference_logprobs,
    tokens_of,
)
from tests.hf_models import save_hf_model

ORIGINAL, CONTEXT, PROMPT = 64, 256, 20
SCALING = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
}


def save_model(folder: Path) -> Any:
    """Save a model whose config.json has YaRN in the form that Qwen publishes; return the model."""
    rope = {**SCALING, "rope_type": SCALING["type"], "rope_theta": 1000.0}
    model = save_hf_model(
        "qwen2",
        folder,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=ORIGINAL,
        rope_parameters={key: value for key, value in rope.items() if key != "type"},
    )
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    del raw["rope_parameters"]
    file.write_text(json.dumps({**raw, "rope_theta": 1000.0, "rope_scaling": SCALING}))
    return model


def scored_by_trainer(folder: Path, ids: list[int]) -> Any:
    """Return log p(ids[t] | ids[:t]) for t = 1..n-1, as the command `megatron-async score` computes
    it."""
    rows, out = folder / "rows.jsonl", folder / "scores.safetensors"
    rows.write_text(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}))
    config = build_config(
        {
            "name": "yarn",
            "root": str(folder),
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "trainer": {"microbatch_tokens": CONTEXT},
        }
    )
    run_ranks(score, 1, config, rows, out)
    return load_file(out)["logprobs"][1:]


def with_rope(model: Any, change: dict[str, Any]) -> Any:
    """Return a copy of the model with the same weights and changed rope parameters."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, **change}
    changed_model = type(model)(config).eval()
    changed_model.load_state_dict(model.state_dict())
    return changed_model


@pytest.mark.slow
@pytest.mark.engine
def test_yarn_engine_has_the_trainers_log_probs_beyond_the_original_context(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    process = SGLangProcess(tmp_path / "model", SETTINGS, tmp_path / "engine.log")
    process.start()
    try:
        engine = EngineUnderTest(process, {}, {})
        prompt, new = list(range(PROMPT)), CONTEXT - PROMPT - 8
        chunks = engine.run(lambda client: collect(client, make_request("long", prompt, new)))
    finally:
        process.stop()
    ids = [*prompt, *tokens_of(chunks).tolist()]
    assert len(ids) == PROMPT + new > 3 * ORIGINAL
    served = logprobs_of(chunks)
    trained = scored_by_trainer(tmp_path, ids)[PROMPT - 1 :]
    published = reference_logprobs(model, ids)[PROMPT - 1 :]
    errors = {"trainer": abs(served - trained), "transformers": abs(served - published)}
    print({name: f"{found.max():.1e}" for name, found in errors.items()})
    assert max(found.max() for found in errors.values()) < EXACT_TOLERANCE
    # Without YaRN's score scale, or with the unscaled frequencies, the errors are far larger.
    for change in ({"attention_factor": 1.0}, {"rope_type": "default"}):
        changed = with_rope(model, change)
        errors_T = abs(served - reference_logprobs(changed, ids)[PROMPT - 1 :])
        assert errors_T[ORIGINAL:].max() > 100 * EXACT_TOLERANCE, change

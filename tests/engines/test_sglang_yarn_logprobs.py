"""Engines serve a model with YaRN at its whole context, with the trainer's log-probs."""

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
    """Save a model whose config.json has YaRN as Qwen's publisher writes it; return it."""
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
    """log p(ids[t] | ids[:t]) for t = 1..n-1, as `megatron-async score` has it."""
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
    """The same weights under another rope."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, **change}
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.slow
@pytest.mark.engine
def test_tokens_beyond_the_original_context_have_the_trainers_log_probs(tmp_path: Path) -> None:
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
    off = {"trainer": abs(served - trained), "transformers": abs(served - published)}
    print({name: f"{found.max():.1e}" for name, found in off.items()})
    assert max(found.max() for found in off.values()) < EXACT_TOLERANCE
    # Without the scale of scores, or with the frequencies as they were, it is off by far more.
    for change in ({"attention_factor": 1.0}, {"rope_type": "default"}):
        changed = with_rope(model, change)
        off_T = abs(served - reference_logprobs(changed, ids)[PROMPT - 1 :])
        assert off_T[ORIGINAL:].max() > 100 * EXACT_TOLERANCE, change

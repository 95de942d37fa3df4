"""Engines serve a model with YaRN at its whole context, with the trainer's log-probs."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from megatron_async.config import build_config
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.sglang.process import SGLangProcess, server_command
from megatron_async.models.architecture import served_context
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


DATA = Path(__file__).parents[1] / "data"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# As its publisher writes it: the length before scaling stands beside it.
QWEN = {**json.loads((DATA / "qwen2.5-72b.config.json").read_text()), "rope_scaling": YARN}
# As other publishers do: the length after it.
AFTER = {**QWEN, "max_position_embeddings": 131072}
IMPLIED = {**QWEN, "rope_scaling": {"type": "yarn", "factor": 4.0}}
SERVED_CONTEXT = 131072


def _override(model: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(model))
    command = server_command(EngineConfig(), folder, 1, "cpu")
    return command[command.index("--json-model-override-args") + 1]


def test_a_model_without_yarn_is_served_at_its_own_context(tmp_path: Path) -> None:
    plain = {key: value for key, value in QWEN.items() if key != "rope_scaling"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert "--json-model-override-args" not in server_command(EngineConfig(), tmp_path, 1, "cpu")


@pytest.mark.slow
@pytest.mark.one_core
def test_sglang_reads_the_context_and_the_frequencies_of_the_trainer(tmp_path: Path) -> None:
    """In a process of its own: the stand-ins that SGLang needs must not reach other tests."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    for name, model in (("before", QWEN), ("after", AFTER), ("implied", IMPLIED)):
        assert served_context(model) == SERVED_CONTEXT
        folder = tmp_path / name
        folder.mkdir()
        (folder / "override").write_text(_override(model, folder))
    result = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import compare; compare({str(tmp_path)!r})"],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # importing SGLang takes a quiet machine ten seconds, a busy one minutes
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def compare(root: str) -> None:
    from megatron_async.engines.sglang.cpu import install_stand_ins

    install_stand_ins()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    from megatron_async.models.families import read_architecture
    from megatron_async.trainer.rotary import inverse_frequencies

    for folder in Path(root).iterdir():
        override = (folder / "override").read_text()
        if folder.name == "before":
            assert ModelConfig(str(folder)).context_len == 32768, "or no override is needed"
        config = ModelConfig(str(folder), model_override_args=override)
        assert config.context_len == SERVED_CONTEXT
        theta, scaling = get_rope_config(config.hf_config)
        a = read_architecture(folder)
        original = scaling["original_max_position_embeddings"]
        assert (scaling["rope_type"], scaling["factor"], theta) == ("yarn", 4.0, a.rope.theta)
        if folder.name != "after":
            assert original == a.rope.original_max_positions == 32768
        served = YaRNScalingRotaryEmbedding(
            a.head_dim, a.head_dim, original, theta, True, scaling["factor"], torch.float32
        )
        assert torch.equal(served._compute_inv_freq(4.0), inverse_frequencies(a.rope, a.head_dim))
        assert abs(served.mscale**2 - a.rope.score_scale) < 1e-12
        assert len(served.cos_sin_cache) == SERVED_CONTEXT

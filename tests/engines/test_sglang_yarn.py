"""Engines serve a model with YaRN at its whole context, with the trainer's frequencies."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.sglang.process import server_command
from megatron_async.models.architecture import served_context

DATA = Path(__file__).parents[1] / "data"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# As its publisher writes it: the length before scaling stands beside it.
QWEN = {**json.loads((DATA / "qwen2.5-72b.config.json").read_text()), "rope_scaling": YARN}
# As other publishers do: the length after it.
AFTER = {**QWEN, "max_position_embeddings": 131072}
IMPLIED = {**QWEN, "rope_scaling": {"type": "yarn", "factor": 4.0}}
CONTEXT = 131072


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
        assert served_context(model) == CONTEXT
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
        assert config.context_len == CONTEXT
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
        assert len(served.cos_sin_cache) == CONTEXT

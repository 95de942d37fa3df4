"""Tests the arguments with which SGLang runs the engines of every shipped configuration on GPUs of
80 GB.

SGLang's own code resolves the command line that an engine's host would start. Only the facts about
the machine are assumed (tests/engines/sglang_arguments.py, which also pickles the arguments that a
server passes to the processes that it spawns).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, load_config
from megatron_async.engines.sglang.process import NO_VERSION, server_command
from megatron_async.launcher.derived import Machine, derive
from megatron_async.models.shape import shape_from_config
from megatron_async.simulate.hardware import gpu_of
from megatron_async.simulate.memory import update_bytes
from tests.config.headers import simulation

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data"
# Base files (*_base.yaml) are not complete configurations; smollm2.yaml is for a laptop, and
# qwen2.5-32b-2nodes.yaml is for GPUs of 141 GB.
CONFIGS = sorted(
    path.stem
    for path in (ROOT / "configs").glob("*.yaml")
    if not path.stem.endswith("_base") and path.stem not in ("smollm2", "qwen2.5-32b-2nodes")
)
# Memory of CUDA, NCCL and kernels in a process, which SGLang does not count as part of its share.
CONTEXT_BYTES = 1.5e9
QWEN_HALF_BILLION = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def config_json(name: str) -> dict[str, Any]:
    """Return config.json of the configuration's model: of the published model, of the quickstart's
    tiny model, or of the placeholder of `rapid`."""
    if name.startswith("quickstart"):
        from megatron_async.models.tiny_model import TinyModel

        return {**TinyModel().config().to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    if name.startswith("rapid"):
        raw = json.loads((DATA / "qwen2.5-7b.config.json").read_text())
        return {**raw, **QWEN_HALF_BILLION}
    shape = re.sub(r"-\d+nodes$|-32k$", "", name.replace("llama3.3", "llama-3.3"))
    shape = "qwen2.5-7b" if name.startswith("colocated") else shape
    found: dict[str, Any] = json.loads((DATA / f"{shape}.config.json").read_text())
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    # The header of such a file asks the user to add this entry to config.json.
    scaling = re.search(r'^#   "rope_scaling": (\{.*\})$', text, re.M)
    return found if scaling is None else {**found, "rope_scaling": json.loads(scaling[1])}


def derived_config(name: str, model: Path | None = None) -> RunConfig:
    """Return the configuration as it starts on nodes with 8 GPUs, with `model` as the model's
    directory if given."""
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    if model is not None:
        settings = config.model.model_copy(update={"path": str(model)})
        config = config.model_copy(update={"model": settings})
    return derive(config, Machine.of_nodes(8, 1, simulation(name).simulate.gpu)).config


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    """The name of each shipped configuration for GPUs of 80 GB."""
    return str(request.param)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    root = tmp_path_factory.mktemp("models")
    found = {}
    for name in CONFIGS:
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config_json(name)))
        found[name] = derived_config(name, root / name)
    return found


@pytest.fixture(scope="module")
def resolved(configs: dict[str, RunConfig]) -> dict[str, dict[str, Any]]:
    """SGLang's resolved arguments by configuration, from one process, because its imports take ten
    seconds."""
    pytest.importorskip("sglang")
    commands = {}
    for name, config in configs.items():
        command = server_command(
            config.engines,
            Path(config.model.path),
            30_000,
            "cuda",
            awaits_weights=True,
        )
        commands[name] = command[command.index(f"--model-path={config.model.path}") :]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang_arguments"],
        cwd=ROOT,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_resolved_arguments_have_the_engine_settings(
    name: str, configs: dict[str, RunConfig], resolved: dict[str, dict[str, Any]]
) -> None:
    config, found = configs[name], resolved[name]
    wanted = {
        "device": "cuda",
        "dtype": "bfloat16",
        "tp_size": config.engines.tensor,
        "weight_version": str(NO_VERSION),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "stream_interval": config.engines.stream_interval,
        "disable_overlap_schedule": False,
        "enable_memory_saver": config.engines.placement == "colocated",
        "max_total_tokens": None,
        "max_running_requests": config.engines.max_running_requests,
    }
    assert {setting: found[setting] for setting in wanted} == wanted


def test_resolved_arguments_have_kernels_and_batch_sizes_of_a_large_gpu(
    name: str, configs: dict[str, RunConfig], resolved: dict[str, dict[str, Any]]
) -> None:
    """Prompts are computed in chunks, so that decoding continues between them; every decode batch
    has a CUDA graph."""
    config, found = configs[name], resolved[name]
    assert found["attention_backend"] in ("fa3", "flashinfer")
    assert 4096 <= found["chunked_prefill_size"] <= 16384
    assert not found["disable_radix_cache"], "a group must share the cache of its prompt"
    decode = found["cuda_graph_config"]["decode"]
    assert decode["backend"] == "full"
    assert isinstance(config.schedule.concurrency, int)
    each = -(-config.schedule.concurrency // config.engines.count)
    assert max(decode["bs"]) == decode["max_bs"]
    assert each <= decode["max_bs"] < each + 8, "larger CUDA graphs would only use memory"


def test_sglang_reserves_the_weight_and_kv_memory_that_the_planner_assumes(
    name: str, configs: dict[str, RunConfig], resolved: dict[str, dict[str, Any]]
) -> None:
    from tests.engines.sglang_arguments import MEMORY_MIB

    settings = simulation(name).simulate
    assumed = settings.engine_memory_share * gpu_of(settings.gpu).memory
    reserved = resolved[name]["mem_fraction_static"] * MEMORY_MIB * 2**20
    assert assumed <= reserved - CONTEXT_BYTES
    assert reserved < 0.9 * MEMORY_MIB * 2**20, "activations of a prefill need memory too"


def test_sglang_leaves_memory_for_a_weight_update(
    name: str, configs: dict[str, RunConfig], resolved: dict[str, dict[str, Any]]
) -> None:
    from tests.engines.sglang_arguments import MEMORY_MIB

    config = configs[name]
    shape = shape_from_config(config_json(name), Path(name))
    needed = update_bytes(shape, config.weights.bucket_mib << 20, config.parallel.pipeline)
    remaining = (1 - resolved[name]["mem_fraction_static"]) * MEMORY_MIB * 2**20
    assert needed + CONTEXT_BYTES < remaining

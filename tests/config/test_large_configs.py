"""Tests the configs of larger models: they load, their layouts fit, and their headers state the
computed figures.

`tests/data/*.config.json` contain the shapes of the public models.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

from megatron_async.commands.launch import Cluster, check_nodes, launch_run
from megatron_async.config import RunConfig, load_config
from megatron_async.errors import UserError
from megatron_async.launcher import preflight
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.devices import DeviceSplit, split_devices
from megatron_async.models.architecture import Architecture, ConfigReader
from megatron_async.models.families import families, read_architecture, rules_of
from megatron_async.models.layout import check_layout
from megatron_async.models.shape import shape_from_config, shape_of
from megatron_async.models.shards import LayerPosition
from megatron_async.rollout.prompt_lengths import max_sequence_tokens
from megatron_async.simulate.hardware import gpu_of
from megatron_async.weight_sync.gpu_sharing import gpus_of
from tests.config.headers import printed, simulation, stated

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data"
GPUS_PER_NODE = 8
MAX_IDLE = 33

# Shape, number of parameters as published with the checkpoint, and total number of nodes.
PUBLISHED = {
    "llama3.3-70b": ("llama-3.3-70b", 70_553_706_496, 16),
    "llama3.3-70b-8nodes": ("llama-3.3-70b", 70_553_706_496, 8),
    "qwen2.5-72b": ("qwen2.5-72b", 72_706_203_648, 16),
    "qwen2.5-72b-32k": ("qwen2.5-72b", 72_706_203_648, 16),
    "qwen2.5-32b": ("qwen2.5-32b", 32_763_876_352, 4),
    "qwen2.5-32b-2nodes": ("qwen2.5-32b", 32_763_876_352, 2),
    "qwen2.5-7b": ("qwen2.5-7b", 7_615_616_512, 1),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 30_532_122_624, 4),
}


# Configs of Qwen2.5-7B in which trainer and engines alternate on all 8 GPUs of a node.
COLOCATED = ("colocated-copris", "colocated-rapid", "colocated-sync")

# Configs of Qwen2.5-0.5B in which trainer and engine alternate on one GPU.
RAPID = ("rapid-math", "rapid-mbpp", "rapid-minif2f")


def architecture_of(shape: str) -> Architecture:
    raw = json.loads((DATA / f"{shape}.config.json").read_text())
    return families()[raw["model_type"]].architecture(ConfigReader(raw, raw["model_type"]))


@dataclass(frozen=True)
class Count:
    """Numbers of parameters outside and inside of experts."""

    dense: int
    experts: int


def count(a: Architecture) -> Count:
    found = {False: 0, True: 0}
    for rule in rules_of(a):
        if rule.exported:
            times = a.num_layers if rule.place is LayerPosition.LAYER else 1
            times *= a.experts.num if rule.expert and a.experts else 1
            found[rule.expert] += times * sum(map(prod, rule.shapes))
    return Count(found[False], found[True])


def state_gigabytes(config: RunConfig, parameters: Count) -> float:
    """Return the weights, gradients and optimizer state of one rank in GB (see
    configs/large_base.yaml)."""
    p = config.parallel
    dense = parameters.dense / (p.tensor * p.pipeline)
    experts = parameters.experts / (p.pipeline * p.expert)
    expert_replicas = p.ranks / p.pipeline / p.expert
    return (6 * (dense + experts) + 12 * (dense / p.data + experts / expert_replicas)) / 1e9


def activation_gigabytes(config: RunConfig, a: Architecture) -> float:
    """Return the activations of a rank in GB: the elements that each operation of a layer keeps, in
    bfloat16."""
    p, trainer = config.parallel, config.trainer
    tokens = trainer.microbatch_tokens / p.tensor
    norms = 4 * a.hidden_size
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    attention = (queries + 2 * keys) + (queries + keys) + queries
    feed_forward: float = 3 * a.ffn_size
    if a.experts is not None:
        feed_forward = a.experts.top_k * (3 * a.experts.ffn_size + 2 * a.hidden_size)
    layer = norms + attention + feed_forward
    layers = a.num_layers // p.pipeline
    recomputed = layers if trainer.recompute == "all" else trainer.recompute
    assert isinstance(recomputed, int)
    kept = recomputed * a.hidden_size + (layers - recomputed) * layer
    at_once = layer if recomputed == layers else 0
    logits = 8 * trainer.logprob_chunk_tokens * a.vocab_size / p.tensor
    return (2 * tokens * (kept * p.pipeline + at_once) + logits) / 1e9


def step_gigabytes(config: RunConfig, parameters: Count) -> float:
    """Return the GB that torch's Adam allocates in addition to the state: one float32 for each
    parameter of a rank."""
    p = config.parallel
    dense = parameters.dense / (p.tensor * p.pipeline) / p.data
    return 4 * (dense + parameters.experts / p.ranks) / 1e9


def gpu_gigabytes(name: str) -> float:
    return gpu_of(simulation(name).simulate.gpu).memory / 1e9


def as_started(name: str) -> RunConfig:
    """Return the settings of a shipped file as a start on its GPUs derives them."""
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    machine = Machine.of_nodes(GPUS_PER_NODE, 1, simulation(name).simulate.gpu)
    return derive(config, machine).config


def figure(name: str, pattern: str) -> float:
    """Return the number that `pattern` captures in the header figures of a config file."""
    found = re.search(pattern, "\n".join(stated(name)))
    assert found, f"{name}.yaml does not state {pattern}"
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_layout_fits_model_and_nodes(name: str) -> None:
    shape, _, nodes = PUBLISHED[name]
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    check_layout(architecture_of(shape), config.parallel)
    check_nodes(config, GPUS_PER_NODE)
    engine_gpus = config.engines.count * config.engines.tensor
    if nodes == 1:
        assert config.parallel.ranks + engine_gpus == GPUS_PER_NODE
    else:
        cluster = Cluster(GPUS_PER_NODE, None, "1:00:00")
        assert config.parallel.nodes + cluster.rollout_nodes(config) == nodes
        assert config.parallel.ranks + engine_gpus == nodes * GPUS_PER_NODE


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_rules_add_up_to_the_published_count(name: str) -> None:
    shape, published, _ = PUBLISHED[name]
    parameters = count(architecture_of(shape))
    assert parameters.dense + parameters.experts == published


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_header_states_the_computed_memory_which_fits_the_gpu(name: str) -> None:
    shape, published, _ = PUBLISHED[name]
    config = as_started(name)
    architecture = architecture_of(shape)
    state = state_gigabytes(config, count(architecture))
    activations = activation_gigabytes(config, architecture)
    weights = 2 * published / config.engines.tensor / 1e9
    assert figure(name, r"state ([\d.]+) GB") == pytest.approx(state, abs=0.06)
    assert figure(name, r"activations ([\d.]+) GB") == pytest.approx(activations, abs=0.06)
    step = step_gigabytes(config, count(architecture))
    peak = state + max(activations, step)
    assert figure(name, r"step ([\d.]+) GB, peak") == pytest.approx(step, abs=0.06)
    assert figure(name, r"peak ([\d.]+) of") == pytest.approx(peak, abs=0.12)
    assert figure(name, r"weights ([\d.]+) GB") == pytest.approx(weights, abs=0.06)
    assert figure(name, r"checkpoint: ([\d,]+) GB") == pytest.approx(12e-9 * published, abs=1)
    gpu = gpu_gigabytes(name)
    assert peak < 0.8 * gpu, "20 % of the memory must be free for buffers"
    assert weights < 0.6 * gpu, "40 % of the memory must be free for the KV cache"


@pytest.mark.parametrize("name", COLOCATED)
def test_colocated_engines_use_every_gpu_of_the_node(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    check_layout(architecture_of("qwen2.5-7b"), config.parallel)
    assert split_devices([str(gpu) for gpu in range(GPUS_PER_NODE)], config) == DeviceSplit()
    engines = config.engines
    gpus = [gpu for e in range(engines.count) for gpu in gpus_of(e, engines.tensor, None)]
    assert gpus == [str(rank) for rank in range(config.parallel.ranks)]
    assert config.schedule.preset == name.rpartition("-")[2]
    assert simulation(name).simulate.placement == engines.placement == "colocated"
    assert shape_of(config) == shape_of(load_config(ROOT / "configs" / "qwen2.5-7b.yaml"))


@pytest.mark.parametrize("name", [*PUBLISHED, *COLOCATED, *RAPID])
def test_config_header_equals_the_output_of_the_figures_command(name: str) -> None:
    assert stated(name) == printed(name), "`python -m tests.config.headers` writes the header"
    assert figure(name, r"idle (\d+) %") < MAX_IDLE, "a third of all GPUs or more is idle"


@pytest.mark.parametrize("name", ["llama3.3-70b", "qwen2.5-32b-2nodes"])
def test_dry_run_shows_the_figures_of_the_config_header(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run needs only config.json and the type of GPU that the file names."""
    raw = (DATA / f"{PUBLISHED[name][0]}.config.json").read_text()
    (tmp_path / "config.json").write_text(raw)
    file = ROOT / "configs" / f"{name}.yaml"
    gpu = simulation(name).simulate.gpu.name
    cluster = Cluster(GPUS_PER_NODE, None, "24:00:00", gpu=gpu)
    with pytest.raises(UserError, match="contains no"):  # A start needs weights.
        launch_run(file, None, [f"model.path={tmp_path}"], cluster, slurm=True, dry_run=True)
    shown = capsys.readouterr().out.splitlines()
    assert set(stated(name)) <= set(shown)


def test_llama3_70b_config_needs_its_documented_override_for_8192_context(tmp_path: Path) -> None:
    """The first Llama of 70B has a context of 8,192, which cannot contain a prompt and 8,192 new
    tokens."""
    raw = json.loads((DATA / "llama-3.3-70b.config.json").read_text())
    del raw["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 8192}))
    file = ROOT / "configs" / "llama3.3-70b.yaml"
    [override] = re.findall(r"^# .* add (sampling\.max_new_tokens=\d+)\.$", file.read_text(), re.M)

    def prompt_budget(*overrides: str) -> int:
        config = load_config(file, [f"model.path={tmp_path}", *overrides])
        config = derive(config, Machine.of_nodes(GPUS_PER_NODE, 4)).config
        longest = max_sequence_tokens(config)
        assert longest is not None
        preflight._check_prompt_budget(config, longest)
        return longest - config.sampling.max_new_tokens

    with pytest.raises(UserError, match=r"sampling\.max_new_tokens is 8192, .* no prompt fits"):
        prompt_budget()
    assert prompt_budget(override) > 2000


def test_every_shipped_config_for_gpus_is_in_the_tables_of_this_module() -> None:
    """Base files have no run name and are not counted; the remaining configs are for two CPU
    cores."""
    files = (ROOT / "configs").glob("*.yaml")
    named = {path.stem for path in files if re.search("^name:", path.read_text(), re.M)}
    laptop = {"quickstart", "quickstart_ci", "smollm2"}
    assert named - laptop == {*PUBLISHED, *COLOCATED, *RAPID}


def test_qwen_32k_config_needs_the_documented_yarn_for_full_responses(tmp_path: Path) -> None:
    """Trainer and engines read the YaRN scaling only from the model's config.json."""
    raw = json.loads((DATA / "qwen2.5-72b.config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    config = load_config(
        ROOT / "configs" / "qwen2.5-72b-32k.yaml",
        [f"model.path={tmp_path}", "engines.max_total_tokens=null"],
    )
    new = config.sampling.max_new_tokens
    assert (max_sequence_tokens(config) or 0) < new, (
        "the run must be refused, because no prompt fits"
    )
    text = (ROOT / "configs" / "qwen2.5-72b-32k.yaml").read_text()
    [scaling] = re.findall(r'^#   "rope_scaling": (\{.*\})$', text, re.M)
    file.write_text(json.dumps({**raw, "rope_scaling": json.loads(scaling)}))
    assert max_sequence_tokens(config) == 65536 - 6
    assert read_architecture(tmp_path).rope.kind == "yarn"
    assert config.trainer.microbatch_tokens > new


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_config_and_config_json_give_the_same_model_shape(name: str) -> None:
    """`simulate`, `plan` and the memory estimate of `--dry-run` need only the file, not the
    weights."""
    shape, _, _ = PUBLISHED[name]
    raw = json.loads((DATA / f"{shape}.config.json").read_text())
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert shape_of(config) == shape_from_config(raw, DATA)

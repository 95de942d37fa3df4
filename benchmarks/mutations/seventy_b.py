"""What the files for 70B promised and the code did not do, taken back place by place.

Names begin with the point of issue 34 ("The 70B files, believed by a sceptic"). Each entry puts
back what was wrong there, or plants what the point's check is there to find.
"""

from __future__ import annotations

from typing import Final

from benchmarks.mutations.mutation import Mutation, apart, taken_back

_LAUNCHER: Final = "megatron_async/launcher"
_TRAINER: Final = "megatron_async/trainer"
_FIGURES: Final = apart("launcher/test_figures.py")
_HEADERS: Final = apart("config/test_large_configs.py", keyword="the_header_is_what")
_EXPERTS: Final = apart("trainer/test_experts.py", limit_seconds=400)
_ENGINE: Final = apart("trainer/test_transformer_engine.py", limit_seconds=400)
_PARITY: Final = apart("trainer/test_model_parity.py", keyword="yarn", limit_seconds=400)

_UPDATE: Final = taken_back(
    "34.1",
    _HEADERS,
    "megatron_async/simulate/trainer_costs.py",
    ("eight senders are simulated", "SENDERS_AT_ONCE * self.gpu.network", "8 * self.gpu.network"),
)
_STOP: Final = (
    *taken_back(
        "34.2",
        _FIGURES,
        f"{_LAUNCHER}/figures.py",
        ("a stop does not wait for the step", "max(step, under_way)", "under_way"),
        (
            "a save under way does not count",
            "checkpoints.write_seconds if config.checkpoint.asynchronous else 0.0",
            "0.0",
        ),
        ("a stop has 90 s", "return max(_LEAST_STOP_SECONDS, found)", "return 90"),
        (
            "storage is not compared",
            "if room < self.most * self.size:",
            "if room < 0:",
        ),
        (
            "a save may take longer than its limit",
            "if write > settings.timeout_seconds:",
            "if write < 0:",
        ),
    ),
    *taken_back(
        "34.2",
        _FIGURES,
        "megatron_async/commands/launch.py",
        ("a notice that cannot hold passes", "or int(found[1]) < needed:", "or False:"),
        (
            "a time limit shorter than the notice passes",
            "if needed > _LARGEST_NOTICE or needed >= seconds_of(self.time_limit):",
            "if needed > _LARGEST_NOTICE:",
        ),
    ),
)
_PAUSE: Final = (
    *taken_back(
        "34.3",
        apart("engines/test_sglang_watchdog.py"),
        "megatron_async/engines/sglang/in_flight.py",
        ("the watchdog counts through a pause", "    scheduler.cur_batch_for_debug = None\n", ""),
    ),
    *taken_back(
        "34.3",
        apart("engines/test_communication.py", keyword="every_role"),
        "megatron_async/engines/nodes.py",
        ("NVLS is off for the trainers too", '"2" if nvls else "0"', '"0"'),
    ),
    *taken_back(
        "34.3",
        apart("launcher/test_derived.py"),
        f"{_LAUNCHER}/derived.py",
        (
            "an engine's receive buffers are not counted",
            "    if left < needed:\n",
            "    if False:\n",
        ),
    ),
)
_MODEL: Final = (
    *taken_back(
        "34.4",
        _EXPERTS,
        f"{_TRAINER}/experts.py",
        (
            "an expert without tokens has the gradient that torch leaves there",
            "dweight if count else torch.zeros_like(dweight)",
            "dweight if count is not None else dweight",
        ),
        (
            "the gradient norm takes an expert for a copy",
            "            set_tensor_model_parallel_attributes("
            "weight, is_parallel=True, dim=0, stride=1)\n",
            "",
        ),
        (
            "experts with the wrong ends",
            "np.cumsum(counts, dtype=np.int32)",
            "np.cumsum(counts[::-1], dtype=np.int32)",
        ),
    ),
    *taken_back(
        "34.4",
        _ENGINE,
        f"{_TRAINER}/policy_model.py",
        (
            "Transformer Engine gets the positions of the whole stream",
            "torch.arange(stream.max_seqlen, device=device)",
            "stream.position_ids_T",
        ),
        (
            "the dummy sequence has no border",
            "torch.cat((packed.cu_seqlens_S1, packed.cu_seqlens_S1[-1:] + missing))",
            "packed.cu_seqlens_S1",
        ),
    ),
)
_CONTAINER: Final = taken_back(
    "34.5",
    apart("launcher/test_scripts.py", keyword="container"),
    "launch/cluster_env.sh",
    ("a container has the host's environment", ":-/opt/venv}", ":-$ROOT/.venv}"),
)
_YARN: Final = (
    *taken_back(
        "34.6",
        _PARITY,
        "megatron_async/models/architecture.py",
        (
            "scores are not scaled",
            '(0.1 * math.log(self.factor) + 1) ** 2 if self.kind == "yarn" else 1.0',
            "1.0",
        ),
        (
            "scores are scaled once",
            "(0.1 * math.log(self.factor) + 1) ** 2",
            "(0.1 * math.log(self.factor) + 1)",
        ),
    ),
    *taken_back(
        "34.6",
        _PARITY,
        f"{_TRAINER}/rotary.py",
        (
            "every frequency is divided",
            "kept = 1 - _yarn_ramp(rope, head_dim)",
            "kept = torch.zeros(())",
        ),
    ),
    *taken_back(
        "34.6",
        apart("engines/test_sglang_yarn.py"),
        "megatron_async/engines/sglang/process.py",
        (
            "SGLang serves the original context",
            '{"max_position_embeddings": context} if context else {}',
            "{}",
        ),
    ),
)
_SCORE: Final = taken_back(
    "34.7",
    apart("train_loop/test_score.py", limit_seconds=400),
    "megatron_async/train_loop/score_rank.py",
    (
        "tokens that are masked have a score",
        "scored_L = mask_L.astype(np.bool_)",
        "scored_L = np.ones(len(mask_L), np.bool_)",
    ),
    ("rows out of order", "found.append(to_host(", "found.insert(0, to_host("),
)

MUTATIONS: Final[tuple[Mutation, ...]] = (
    *_UPDATE,
    *_STOP,
    *_PAUSE,
    *_MODEL,
    *_CONTAINER,
    *_YARN,
    *_SCORE,
)

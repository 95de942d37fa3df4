"""Points 1.1, 1.2, 1.4 and 1.5 of issue 16, taken back: what is there before anything runs.

The environment of processes, the machine, the shipped configurations, derived settings.
"""

from __future__ import annotations

from typing import Final

from benchmarks.mutations.mutation import Check, Mutation, apart, taken_back

_LAUNCHER: Final = "megatron_async/launcher"
_SGLANG: Final = "megatron_async/engines/sglang"
_TRAINER: Final = "megatron_async/trainer"
_NODES: Final = "megatron_async/engines/nodes.py"
_MACHINE: Final = "megatron_async/commands/machine_checks.py"

_ALIKE: Final = apart("engines/test_communication.py", keyword="every_role or resolves_to")
_STARTS: Final = apart("launcher/test_environment.py")
_ENVIRONMENT: Final = (
    *taken_back(
        "1.1",
        _ALIKE,
        _NODES,
        ("NCCL_CUMEM_ENABLE is left to each side", '    "NCCL_CUMEM_ENABLE": "0",\n', ""),
        (
            "NCCL_NVLS_ENABLE insists on what the hardware may not have",
            '"NCCL_NVLS_ENABLE": "2" if nvls',
            '"NCCL_NVLS_ENABLE": "1" if nvls',
        ),
        (
            "the interface is what the host name resolves to",
            "return str(opened.getsockname()[0])",
            "return socket.gethostbyname(socket.gethostname())",
        ),
    ),
    *taken_back(
        "1.1",
        _ALIKE,
        f"{_LAUNCHER}/environment.py",
        (
            "trainer ranks choose their NCCL settings alone",
            "    added |= communication_environment(base, one_machine=one_machine, nvls=nvls)\n",
            "",
        ),
        (
            "engines of other nodes choose their NCCL settings alone",
            "return _RAY_NODE | communication_environment(base, one_machine=False, nvls=nvls)",
            "return dict(_RAY_NODE)",
        ),
    ),
    *taken_back(
        "1.1",
        _ALIKE,
        f"{_SGLANG}/process.py",
        (
            "a server chooses its interface alone",
            "    environment |= communication_environment("
            "base, one_machine=local, nvls=settings.uses_nvls)\n",
            "",
        ),
    ),
    *taken_back(
        "1.1",
        _STARTS,
        f"{_LAUNCHER}/environment.py",
        ("CUDA_DEVICE_MAX_CONNECTIONS is not set", '    "CUDA_DEVICE_MAX_CONNECTIONS": "1",\n', ""),
        (
            "CUDA_DEVICE_MAX_CONNECTIONS has CUDA's default",
            '"CUDA_DEVICE_MAX_CONNECTIONS": "1"',
            '"CUDA_DEVICE_MAX_CONNECTIONS": "8"',
        ),
        ("no expandable segments", '"expandable_segments:True"', '"expandable_segments:False"'),
        (
            "expandable segments also where engines open the memory",
            "if hands_memory_to_engines:",
            "if False:",
        ),
    ),
    *taken_back(
        "1.1",
        _STARTS,
        f"{_LAUNCHER}/node.py",
        (
            "by hand and under Slurm ranks have the shell's environment",
            "environment=trainer_environment(\n            os.environ,\n",
            "environment=(lambda base, **_: base)(\n            os.environ,\n",
        ),
        (
            "ranks of several nodes connect over the loopback",
            "one_machine=False,",
            "one_machine=True,",
        ),
        (
            "a Ray node by hand has the shell's environment",
            "            ray_node_environment(os.environ, nvls=self.config.engines.uses_nvls),\n",
            "            dict(os.environ),\n",
        ),
        (
            "a node's ranks hand expandable segments to engines",
            '            hands_memory_to_engines=config.weights.transport == "tensor",\n',
            "",
        ),
    ),
    *taken_back(
        "1.1",
        _STARTS,
        f"{_LAUNCHER}/supervisor.py",
        (
            "one machine's ranks hand expandable segments to engines",
            '            hands_memory_to_engines=config.weights.transport == "tensor",\n',
            "",
        ),
    ),
    *taken_back(
        "1.1",
        _STARTS,
        "megatron_async/launcher/rank_job.py",
        (
            "fine-tuning has the shell's environment",
            "environment=trainer_environment(os.environ, one_machine=node is None)",
            "environment=dict(os.environ)",
        ),
    ),
    *taken_back(
        "1.1",
        apart("launcher/test_scripts.py", keyword="is_not_set_by_scripts"),
        "launch/cluster_env.sh",
        (
            "Slurm's script sets what NCCL needs, for its own way of starting alone",
            "export PATH=",
            "export NCCL_CUMEM_ENABLE=0 CUDA_DEVICE_MAX_CONNECTIONS=1 PATH=",
        ),
    ),
)

_DOCTOR: Final = apart("commands/test_machine_checks.py", keyword="not fits_eighty")
_LOCK: Final = apart("launcher/test_gpu_lock.py")
_MACHINE_CHECKS: Final = (
    *taken_back(
        "1.2",
        _DOCTOR,
        _MACHINE,
        ("a driver of CUDA 12 passes for CUDA 13", "13: 580", "13: 525"),
        (
            "an older glibc than SGLang's kernels need passes",
            "LEAST_GLIBC: Final = (2, 34)",
            "LEAST_GLIBC: Final = (2, 17)",
        ),
        (
            "nvcc is not looked for",
            '        ("nvcc", machine.nvcc, '
            '"FlashInfer\'s kernels cannot be built: load a CUDA module"),\n',
            "",
        ),
        (
            "a C++ compiler is not looked for",
            '        ("C++ compiler", machine.compiler, '
            '"Triton cannot build its launchers: install g++"),\n',
            "",
        ),
        (
            "Python.h is not looked for",
            '        ("Python.h", header, "Triton needs it: install python3-dev"),\n',
            "",
        ),
        (
            "free disk is shown and not compared",
            "_below(machine.disk, LEAST_DISK,",
            "_below(LEAST_DISK, LEAST_DISK,",
        ),
        (
            "shared memory is shown and not compared",
            "                machine.shared_memory,\n                LEAST_SHARED_MEMORY,",
            "                LEAST_SHARED_MEMORY,\n                LEAST_SHARED_MEMORY,",
        ),
        (
            "the usual 1,024 open files pass",
            "LEAST_OPEN_FILES: Final = 65_536",
            "LEAST_OPEN_FILES: Final = 1_024",
        ),
        (
            "NCCL of two minor versions passes",
            "_numbers(built)[:2] == _numbers(wheel)[:2]",
            "_numbers(built)[:1] == _numbers(wheel)[:1]",
        ),
        (
            "with a driver too old for torch the machine passes for one without a GPU",
            "if driver or torch.cuda.is_available() else None",
            "if torch.cuda.is_available() else None",
        ),
    ),
    *taken_back(
        "1.2",
        _DOCTOR,
        "megatron_async/commands/doctor.py",
        (
            "doctor does not show the machine",
            '    return [*lines, "", *machine, "", *used]',
            '    return [*lines, "", *used]',
        ),
    ),
    *taken_back(
        "1.2",
        apart("trainer/test_model_pieces.py", keyword="apex"),
        f"{_TRAINER}/capabilities.py",
        (
            "PyPI's apex is taken for NVIDIA's",
            'apex=_version_of("apex.optimizers", "apex", "FusedAdam")',
            'apex=_version_of("apex", "apex")',
        ),
        (
            "apex.optimizers without FusedAdam is taken for NVIDIA's",
            "if attribute is not None and not hasattr(found, attribute):",
            "if False:",
        ),
    ),
    *taken_back(
        "1.2",
        _LOCK,
        "launch/requirements-gpu.txt",
        ("a requirement is raised and the lock is not", "sglang==0.5.23", "sglang==0.5.24"),
    ),
    *taken_back(
        "1.2",
        _LOCK,
        "launch/requirements-gpu-lock.txt",
        ("torch is not locked", "torch==2.14.1\n", ""),
        ("NCCL is not locked", "nvidia-nccl-cu13==2.30.7\n", ""),
    ),
)


def _idle(name: str) -> Check:
    return apart("config/test_large_configs.py", keyword=f"gpus_idle and {name}")


_CONFIGS: Final = (
    *taken_back(
        "1.4",
        _idle("llama3"),
        "configs/llama3.3-70b.yaml",
        (
            "70B trains and generates in turn on GPUs of their own",
            "schedule:\n",
            "schedule:\n  preset: copris\n",
        ),
    ),
    *taken_back(
        "1.4",
        _idle("72b"),
        "configs/large_base.yaml",
        (
            "every large run has the schedule for one GPU that both share",
            "preset: pipeline",
            "preset: copris",
        ),
    ),
    *taken_back(
        "1.4",
        _idle("qwen2.5-7b"),
        "configs/qwen2.5-7b.yaml",
        ("7B has a laptop's concurrency", "concurrency: 450", "concurrency: 96"),
    ),
    *taken_back(
        "1.4",
        _idle("30b"),
        "configs/qwen3-30b-a3b.yaml",
        ("30B-A3B generates on one engine", "  count: 4\n", "  count: 1\n"),
    ),
)

_DERIVED: Final = apart("launcher/test_derived.py", keyword="not sglang_has")
_DRY_RUN: Final = apart("launcher/test_launch.py", keyword="dry_run_shows")
_DERIVED_SETTINGS: Final = (
    *taken_back(
        "1.5",
        _DERIVED,
        f"{_LAUNCHER}/derived.py",
        (
            "engines.max_total_tokens on a GPU is a laptop's",
            '    return None, f"SGLang takes what',
            '    return config.engines.max_total_tokens, f"SGLang takes what',
        ),
        (
            "schedule.concurrency is a laptop's",
            '    return found, (\n        "the smallest',
            '    return default, (\n        "the smallest',
        ),
        (
            "task.scorer_workers does not follow the cores",
            "return max(base, half), f",
            "return base, f",
        ),
        (
            "engines.cuda_graph_batch is SGLang's own",
            "    return math.ceil(each / _GRAPH_STEP) * _GRAPH_STEP, (\n",
            "    return None, (\n",
        ),
        (
            "what was set is derived all the same",
            "if field in settings.model_fields_set:",
            "if False:",
        ),
    ),
    *taken_back(
        "1.5",
        _DRY_RUN,
        f"{_LAUNCHER}/derived.py",
        (
            "a dry run does not show the memory",
            "    return [*lines, *_memory_lines(config, machine, shape)]\n",
            "    return lines\n",
        ),
    ),
    *taken_back(
        "1.5",
        _DRY_RUN,
        "megatron_async/commands/launch.py",
        (
            "a dry run does not show the layout",
            "[*figures(derived.config, machine), *derived",
            "[*derived",
        ),
        ("a dry run does not show what is derived", ", *derived.lines()]", "]"),
    ),
    *taken_back(
        "1.5",
        apart("config/test_large_configs.py", keyword="file_as_shipped and llama3"),
        "configs/llama3.3-70b.yaml",
        ("the plan of the 70B needs its weights", "models/Llama-3.3-70B-Instruct", "models/policy"),
    ),
)

MUTATIONS: Final[tuple[Mutation, ...]] = (
    *_ENVIRONMENT,
    *_MACHINE_CHECKS,
    *_CONFIGS,
    *_DERIVED_SETTINGS,
)

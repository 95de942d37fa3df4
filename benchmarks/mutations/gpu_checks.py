"""Section 2 of issue 16: each check without a GPU has a defect planted that it is there to find."""

from __future__ import annotations

from typing import Final

from benchmarks.mutations.mutation import Check, Mutation, apart, taken_back

_LAUNCHER: Final = "megatron_async/launcher"
_SGLANG: Final = "megatron_async/engines/sglang"
_TRAINER: Final = "megatron_async/trainer"
_SYNC: Final = "megatron_async/weight_sync"
_NODES: Final = "megatron_async/engines/nodes.py"
# For tests of several ranks, or that import SGLang, start an engine or build every family.
_LONG_SECONDS: Final = 560.0


def _sglang(tests: str, keyword: str) -> Check:
    return apart(tests, keyword=keyword, limit_seconds=_LONG_SECONDS)


MUTATIONS: Final[tuple[Mutation, ...]] = (
    *taken_back(
        "2 parity with _set_envs_and_config:",
        _sglang("engines/test_communication.py", "sglang_leaves_its_servers"),
        _NODES,
        (
            "NCCL_CUMEM_ENABLE is not what SGLang sets for its servers",
            '"NCCL_CUMEM_ENABLE": "0"',
            '"NCCL_CUMEM_ENABLE": "1"',
        ),
    ),
    *taken_back(
        "2 parity with _set_envs_and_config:",
        _sglang("engines/test_communication.py", "for_servers_alone and nvls"),
        "megatron_async/config/sampling_contract.py",
        (
            "an argument that changes it for servers alone is taken",
            '    "--enable-nccl-nvls": _OTHER_NCCL,\n',
            "",
        ),
    ),
    *taken_back(
        "2 resolved server arguments:",
        _sglang("engines/test_sglang_arguments.py", "kernels_and_batches or settings_arrive"),
        f"{_SGLANG}/process.py",
        (
            "CUDA graphs stop at SGLang's own size",
            'if settings.cuda_graph_batch is not None and device == "cuda":',
            "if False:",
        ),
        (
            "the overlap scheduler is off",
            '        "--enable-metrics",\n',
            '        "--enable-metrics",\n        "--disable-overlap-schedule",\n',
        ),
    ),
    *taken_back(
        "2 FakeTensorMode per family:",
        _sglang("trainer/test_fake_gpu.py", "each_family"),
        f"{_TRAINER}/policy_model.py",
        (
            "a router's weight stays on the host",
            "        parameter.data = parameter.data.to(device=current_device())\n",
            "        pass\n",
        ),
    ),
    *taken_back(
        "2 rendezvous keys:",
        _sglang("weight_sync/test_rendezvous.py", ""),
        f"{_SYNC}/transports/distributed.py",
        (
            "the sender waits where SGLang's groups of one device kind are not",
            '    return dist.PrefixStore(f"{device}/", by_group)\n',
            "    return by_group\n",
        ),
    ),
    *taken_back(
        "2 signatures of GPU-only calls:",
        apart("test_gpu_signatures.py"),
        f"{_SYNC}/transports/distributed.py",
        (
            "NCCL's group gets its size where its rank belongs",
            "dist.ProcessGroupNCCL(store, 0, self.world_size, options)",
            "dist.ProcessGroupNCCL(store, self.world_size, 0, options)",
        ),
        (
            "NCCL's options get a name that they do not have",
            "            options._timeout = limit\n",
            "            options.timeout = limit\n",
        ),
    ),
    *taken_back(
        "2 signatures of GPU-only calls:",
        apart("test_gpu_signatures.py"),
        f"{_TRAINER}/offload.py",
        (
            "a function of torch.cuda that is not there is called",
            "torch.cuda.ipc_collect()",
            "torch.cuda.collect_ipc()",
        ),
    ),
    *taken_back(
        "2 signatures of GPU-only calls:",
        apart("test_gpu_signatures.py"),
        f"{_SYNC}/transports/distributed.py",
        (
            "SGLang is sent a field that it does not have",
            '                "backend": backend,\n',
            '                "backend": backend,\n                "timeout": JOIN_SECONDS,\n',
        ),
    ),
    *taken_back(
        "2 fake-GPU placement:",
        apart("launcher/test_gpu_placement.py", keyword="share_no_gpu and llama3"),
        "megatron_async/engines/host.py",
        (
            "a place gives an engine one GPU for all its tensor ranks",
            "gpus=self._settings.tensor if on_gpu and not shared else 0,",
            "gpus=1 if on_gpu and not shared else 0,",
        ),
    ),
    *taken_back(
        "2 fake-GPU placement:",
        apart("launcher/test_gpu_placement.py", keyword="unless_they_are_meant_to"),
        f"{_LAUNCHER}/devices.py",
        (
            "trainers and engines both begin with the first GPU",
            '",".join(gpus[ranks : ranks + wanted])',
            '",".join(gpus[:wanted])',
        ),
    ),
    *taken_back(
        "2 engines by spawn:",
        _sglang("engines/test_sglang_spawn.py", ""),
        f"{_SGLANG}/server.py",
        (
            "a spawned scheduler has none of our hooks",
            "    ahead = updater.AheadHooks()\n",
            "    if __name__ == '__mp_main__':\n        return\n"
            "    ahead = weight_updater.AheadHooks()\n",
        ),
    ),
    *taken_back(
        "2 stub NCCL over gloo with delays:",
        apart("weight_sync/test_slow_engines.py", keyword="gives_up or given_up"),
        f"{_SYNC}/transports/distributed.py",
        (
            "the first broadcast waits for engines that have no announcement",
            "                announced = self._announce(flat, following, transfer)\n"
            "                self._start_first(flat.bytes_N, announced, transfer)\n",
            "                self._start_first(flat.bytes_N, announced, transfer)\n"
            "                announced = self._announce(flat, following, transfer)\n",
        ),
    ),
    *taken_back(
        "2 stub NCCL over gloo with delays:",
        apart("weight_sync/test_slow_engines.py", keyword="late_joiner"),
        f"{_SYNC}/transports/distributed.py",
        (
            "an engine that is late once is refused",
            "JOIN_SECONDS,\n        )\n        try:",
            "0.2,\n        )\n        try:",
        ),
    ),
)

"""Points 1.3 and 1.6 to 1.9 of issue 16, taken back: the work of trainers and engines on GPUs.

Attention, the difference between engines and trainer, a save's memory, turns on shared GPUs, waits.
"""

from __future__ import annotations

from typing import Final

from benchmarks.mutations.mutation import Mutation, apart, taken_back

_SGLANG: Final = "megatron_async/engines/sglang"
_TRAINER: Final = "megatron_async/trainer"
_SYNC: Final = "megatron_async/weight_sync"
_KERNELS: Final = "megatron_async/trainer/attention_kernels.py"
# For tests of several ranks, or that import SGLang, start an engine or build every family.
_LONG_SECONDS: Final = 560.0

_ATTENTION: Final = apart("trainer/test_attention.py")
_ATTENTION_ALONE: Final = (
    *taken_back(
        "1.3",
        _ATTENTION,
        _KERNELS,
        (
            "varlen_attn of torch 2.11 is called with the arguments of 2.12",
            'if stream.group > 1 and "enable_gqa" in _parameters(attend):',
            "if stream.group > 1:",
        ),
        (
            "varlen_attn is called with is_causal, as torch 2.10 has it",
            '{"window_size": (-1 if window is None else window - 1, 0)}',
            '{"is_causal": True}',
        ),
        (
            "a function is called whatever its signature",
            " and _parameters(function) >= library.needs:",
            ":",
        ),
        (
            "FlashAttention gets torch's mark for no window",
            '{} if window is None else {"window_size": (window - 1, 0)}',
            '{"window_size": (-1 if window is None else window - 1, 0)}',
        ),
        (
            "FlashAttention 3 and 4, which return a tuple, are read as 2",
            "result[0] if isinstance(result, tuple) else result",
            "result",
        ),
        (
            "FlexAttention sees all before a window",
            "return same & (key <= query) & (query - key < seen)",
            "return same & (key <= query)",
        ),
        (
            "FlexAttention sees other sequences",
            "return same & (key <= query) & (query - key < seen)",
            "return (key <= query) & (query - key < seen)",
        ),
        (
            "a FlashAttention that was built for another torch ends the run",
            "RuntimeError, AttributeError, AssertionError",
            "RuntimeError, AttributeError",
        ),
        (
            "float32 on a GPU goes to flash attention",
            " or query_THD.dtype not in (torch.float16, torch.bfloat16):",
            ":",
        ),
    ),
    *taken_back(
        "1.3",
        apart("trainer/test_model_pieces.py", keyword="TestAttention"),
        _KERNELS,
        (
            "in float32 the window is one key wider",
            "(distance >= 0) & (distance < window)",
            "(distance >= 0) & (distance <= window)",
        ),
    ),
)

_DRIFT: Final = (
    *taken_back(
        "1.6",
        apart("train_loop/test_written_metrics.py"),
        "megatron_async/train_loop/loop.py",
        (
            "the difference between engines and trainer is not written step by step",
            "metrics |= {**update.metrics, **self._update_seconds}",
            "metrics |= self._update_seconds",
        ),
    ),
    *taken_back(
        "1.6",
        apart("telemetry/test_metrics.py", keyword="drift"),
        "megatron_async/telemetry/health.py",
        (
            "engines that drift from the trainer are not named",
            "                self._seen[metric].append(metrics[metric])\n",
            "                pass\n",
        ),
        (
            "a resume forgets the first steps",
            "[metrics[PROBE] for metrics in steps if PROBE in metrics]",
            "[]",
        ),
    ),
    *taken_back(
        "1.6",
        apart("report/test_report.py", keyword="every_kind_of_panel"),
        "megatron_async/report/panels.py",
        (
            "the report has no curve of the difference",
            '(("mean", "weights/probe_mean_error"), ("largest", "weights/probe_max_error")),',
            "(),",
        ),
    ),
    *taken_back(
        "1.6",
        apart("engines/test_sglang_head.py", keyword="half_precision_engines"),
        f"{_SGLANG}/process.py",
        (
            "engines round logits to bfloat16",
            '        *([] if dtype == "float32" else ["--enable-fp32-lm-head"]),\n',
            "",
        ),
    ),
    *taken_back(
        "1.6",
        apart("kernels/test_token_logprob.py", keyword="half_precision"),
        "kernels/megatron_async_kernels/chunked.py",
        (
            "the trainer's head rounds logits to bfloat16",
            "    torch.mm(hidden_CD, weight_BD.t(), out=logits_CB)\n",
            "    logits_CB.copy_(torch.mm(hidden_CD, weight_BD.t()).bfloat16())\n",
        ),
    ),
)

_SHARES: Final = apart(
    "checkpoint/test_layouts.py", keyword="no_rank_holds", limit_seconds=_LONG_SECONDS
)
_CHECKPOINTS: Final = (
    *taken_back(
        "1.7",
        _SHARES,
        "megatron_async/checkpoint/writer.py",
        (
            "a rank that saves gathers the whole state first",
            "    pieces = [CopiedPiece.of(piece, place, pinned)",
            "    whole = [p.clone() for p in trainer.wrapped.parameters() for _ in range(3)]\n"
            "    pieces = [CopiedPiece.of(piece, place, pinned)",
        ),
    ),
    *taken_back(
        "1.7",
        _SHARES,
        "megatron_async/checkpoint/state.py",
        (
            "a rank that loads holds the whole state first",
            "            for shard in held_shards(trainer):\n                load_shard(",
            "            whole = [torch.ones(record.shape) for record in tensors.values()]\n"
            "            for shard in held_shards(trainer):\n                load_shard(",
        ),
        (
            "each data-parallel rank saves all that it holds",
            "            begin, end = _share(end, *replicas(place))\n",
            "            pass\n",
        ),
    ),
)

_ENGINE_RANKS: Final = apart("weight_sync/test_shared_gpus.py", keyword="engine_ranks or own_gpus")
_HANDED: Final = apart(
    "weight_sync/test_shared_gpus.py", keyword="every_tensor_rank", limit_seconds=_LONG_SECONDS
)
_TURNS: Final = apart("end_to_end/test_colocated.py")
_REST: Final = apart("rollout/test_shared_devices.py")
_COLOCATED: Final = (
    *taken_back(
        "1.8",
        _ENGINE_RANKS,
        f"{_SYNC}/gpu_sharing.py",
        (
            "rank 0 gives weights to every engine",
            "    engine = rank // tensor\n",
            "    engine = 0\n",
        ),
        (
            "every engine is on the first GPUs",
            "    return [names[place].strip() for place in places]\n",
            "    return [name.strip() for name in names[:tensor]]\n",
        ),
    ),
    *taken_back(
        "1.8",
        _ENGINE_RANKS,
        "megatron_async/engines/host.py",
        (
            "an engine sees all GPUs of the trainer",
            "            gpus = gpus_of(shared_index, settings.tensor, "
            'os.environ.get("CUDA_VISIBLE_DEVICES"))\n',
            "            gpus = None\n",
        ),
    ),
    *taken_back(
        "1.8",
        _HANDED,
        f"{_SYNC}/publisher.py",
        (
            "all tensor ranks of an engine get the leader's handles",
            "return HandedBucket(flat, found or [])",
            "return HandedBucket(flat, [payload] * self._size if self.leads else [])",
        ),
        ("a bucket is freed while an engine loads it", "_HELD_BUCKETS = 3", "_HELD_BUCKETS = 1"),
    ),
    *taken_back(
        "1.8",
        _TURNS,
        "megatron_async/train_loop/loop.py",
        (
            "the trainer keeps its memory while engines generate",
            "        self.memory.hold(Residence.NOTHING)\n",
            "",
        ),
        (
            "engines take memory that another rank still holds",
            "            self.rank_zero.all_here()\n",
            "            pass\n",
        ),
        (
            "the trainer trains with its weights alone on the device",
            "        self.memory.hold(Residence.ALL)\n        report =",
            "        report =",
        ),
    ),
    *taken_back(
        "1.8",
        _REST,
        "megatron_async/rollout/shared_devices.py",
        (
            "engines keep their memory while the trainer trains",
            "            await engine.release_memory(keep_weights=keep_weights)\n",
            "",
        ),
        (
            "engines generate without taking their memory again",
            "            await engine.resume_memory(weights_only=False)\n",
            "",
        ),
    ),
    *taken_back(
        "1.8",
        apart("trainer/test_offload.py"),
        f"{_TRAINER}/offload.py",
        (
            "memory that was copied to the host stays allocated",
            "            moved += copy.nbytes\n            storage.resize_(0)\n",
            "            moved += copy.nbytes\n",
        ),
        (
            "gradients stay on the device while engines generate",
            "                storage.resize_(0)\n",
            "",
        ),
    ),
    *taken_back(
        "1.8",
        apart("config/test_large_configs.py", keyword="every_gpu_of_the_node"),
        "configs/colocated_base.yaml",
        ("the runs for one node leave four GPUs without an engine", "  count: 8\n", "  count: 4\n"),
    ),
)

_PINNED: Final = apart("trainer/test_offload.py", keyword="asks_for or is_asked_for")
_SAVED: Final = apart("checkpoint/test_manager.py", keyword="host_memory or was_pinned")
_NO_WAITS: Final = apart("trainer/test_no_waits.py")
_COSTS: Final = (
    *taken_back(
        "1.9",
        apart("engines/test_sglang_process.py", keyword="await"),
        f"{_SGLANG}/process.py",
        (
            "an engine reads weights that the first update overwrites",
            'if settings.quantization == "fp8" or (awaits_weights and device == "cuda"):',
            'if settings.quantization == "fp8":',
        ),
    ),
    *taken_back(
        "1.9",
        apart("engines/test_sglang_process.py", keyword="await"),
        "megatron_async/engines/host.py",
        (
            "the engines of a run do not wait for the first update",
            "            awaits_weights=True,\n",
            "",
        ),
    ),
    *taken_back(
        "1.9",
        apart("trainer/test_step.py", keyword="main_gradient_without_apex"),
        f"{_TRAINER}/policy_model.py",
        (
            "the head's gradient is made in bfloat16 where Apex is not installed",
            'getattr(weight, "main_grad", None) if torch.is_grad_enabled() else None',
            'getattr(weight, "main_grad", None) if self.config.gradient_accumulation_fusion '
            "else None",
        ),
    ),
    *taken_back(
        "1.9",
        _PINNED,
        "megatron_async/runtime/host_buffers.py",
        (
            "host memory is pinned at every copy",
            "            self._kept[place : place + 1] = [kept]\n",
            "",
        ),
    ),
    *taken_back(
        "1.9",
        _PINNED,
        f"{_TRAINER}/offload.py",
        (
            "what leaves the device gets new host memory each time",
            "copy = self._host.copy(len(self._away), _bytes_of(storage))",
            "copy = HostBuffers().copy(0, _bytes_of(storage))",
        ),
    ),
    *taken_back(
        "1.9",
        _PINNED,
        f"{_TRAINER}/reference.py",
        (
            "the reference policy gets new host memory each time",
            "own = self._snapshot(self._own)",
            "own = self._snapshot(HostBuffers())",
        ),
    ),
    *taken_back(
        "1.9",
        _SAVED,
        "megatron_async/checkpoint/writer.py",
        (
            "a save copies to memory that is not pinned",
            "replace(live, values=pinned.copy(place, values))",
            'replace(live, values=values.to("cpu", copy=True))',
        ),
    ),
    *taken_back(
        "1.9",
        _SAVED,
        "megatron_async/checkpoint/manager.py",
        (
            "each save pins memory of its own",
            "prepare(trainer, self._pinned)",
            "prepare(trainer, HostBuffers())",
        ),
    ),
    *taken_back(
        "1.9",
        _NO_WAITS,
        f"{_TRAINER}/forward.py",
        (
            "the host waits for every microbatch's loss",
            "found = algorithm.loss(inputs, denominators, check=False)",
            "found = algorithm.loss(inputs, denominators, check=True)",
        ),
        (
            "the host decides at every microbatch whether its loss is finite",
            "found = _if(found.finite, found)",
            "found = found if found.finite.item() else _if(found.finite, found)",
        ),
    ),
    *taken_back(
        "1.9",
        _NO_WAITS,
        "megatron_async/algorithms/device_batch.py",
        (
            "arrays go to the device from memory that is not pinned",
            'tensor.pin_memory() if target.type == "cuda" else tensor',
            "tensor",
        ),
    ),
)

MUTATIONS: Final[tuple[Mutation, ...]] = (
    *_ATTENTION_ALONE,
    *_DRIFT,
    *_CHECKPOINTS,
    *_COLOCATED,
    *_COSTS,
)

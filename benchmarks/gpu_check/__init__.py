"""What one GPU can settle within half an hour, in parts of at most nine minutes each.

    python -m benchmarks.gpu_check              everything that has no result yet
    python -m benchmarks.gpu_check --part 2     one part
    python -m benchmarks.gpu_check --list       the checks, what they need, their limits
    python -m benchmarks.gpu_check --rehearse   the trainer's checks on a CPU, at toy sizes

Each check prints one line of JSON and appends it to `benchmarks/results/gpu/DEVICE.jsonl` when it
ends, whatever its result; a check that has an `ok` line there for this device, torch and triton is
not run again (`--again` does). What a check needs and is not there, is the reason it is skipped.

Wheels that a machine with torch, triton, numpy, safetensors and einops lacks: megatron-core,
zstandard, and for our settings pydantic with pydantic-core, annotated-types and typing-inspection
(`doctor`: orjson and msgspec too). The kernels' rates need none of them; their tests need pytest,
hypothesis and our settings'.
"""

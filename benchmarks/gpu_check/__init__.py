"""What one GPU can settle within half an hour, in parts of at most nine minutes each.

    python -m benchmarks.gpu_check              everything that has no result yet
    python -m benchmarks.gpu_check --part 2     one part
    python -m benchmarks.gpu_check --list       the checks, what they need, their limits
    python -m benchmarks.gpu_check --wheels W   collect packages for a machine without a network
    python -m benchmarks.gpu_check --trial-run   the trainer's checks on a CPU, at toy sizes

Each check prints one line of JSON and appends it to `benchmarks/results/gpu/DEVICE.jsonl` when it
ends, whatever its result; a check that has an `ok` line there for this device, torch and triton is
not run again (`--again` does). What a check needs and is not there, is the reason it is skipped.

`--wheels DIR` collects the packages that the checks need in addition to torch, Triton,
transformers, numpy and safetensors, for Python 3.12 on x86-64, and prints how to install them on a
machine without a network. The kernels' rates need none of them; their tests need pytest and
hypothesis, too.
"""

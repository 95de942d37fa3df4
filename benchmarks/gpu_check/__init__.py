"""Checks kernels and trainer on one GPU within half an hour, in parts of at most nine minutes.

    python -m benchmarks.gpu_check              all checks without a result
    python -m benchmarks.gpu_check --part 2     the checks of one part
    python -m benchmarks.gpu_check --list       list checks with their requirements and limits
    python -m benchmarks.gpu_check --wheels W   collect packages for a machine without a network
    python -m benchmarks.gpu_check --trial-run  the trainer's checks on a CPU, at toy sizes

When a check ends, it prints its result as one line of JSON and appends the line to
`benchmarks/results/gpu/DEVICE.jsonl`. A check that has an `ok` line there for this device and these
versions of torch and triton is not repeated, except with `--again`. If a module that a check needs
is not installed, the check is skipped, and its line names the module.

`--wheels DIR` collects the packages that the checks need in addition to torch, Triton,
transformers, numpy and safetensors, for Python 3.12 on x86-64. It prints how to install them on a
machine without a network. The checks of the kernels' rates need none of these packages. The check
`kernel_tests` also needs pytest and hypothesis, which `--wheels` does not collect.
"""

"""Time and memory of converting a synthetic Llama, from Hugging Face form and back.

    python -m benchmarks.convert --gigabytes 4 --shard-gb 1 --tp 2 --pp 2

Every conversion runs in a process of its own; its peak resident memory is compared with the largest
Hugging Face file. Mapped files count as resident, so the figure is an upper bound. The result is
compared with the source bit by bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from megatron_async.checkpoint.placement import stage_slots
from megatron_async.models.export import buckets
from megatron_async.models.families import read_architecture
from megatron_async.models.save import write_model_directory


def write_source(folder: Path, gigabytes: float, shard_gb: float) -> int:
    """A random bf16 Llama of about this size; its bytes."""
    layers = max(1, round(gigabytes / 0.25))  # a layer of this shape has 0.25 GB
    config = {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_attention_heads": 24,
        "num_key_value_heads": 24,
        "num_hidden_layers": layers + layers % 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    shape_only = folder.parent / "config"
    shape_only.mkdir()
    (shape_only / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(shape_only)
    total = 0
    generator = torch.Generator().manual_seed(0)

    def tensors():  # type: ignore[no-untyped-def]
        nonlocal total
        for slot in stage_slots(architecture, 0, 1):
            for name, shape in zip(slot.tensor_names, slot.rule.shapes, strict=True):
                # Below the bits of infinity: a conversion refuses what no model has.
                bits = torch.randint(0, 0x7F80, shape, generator=generator, dtype=torch.int16)
                total += bits.nbytes
                yield name, bits.view(torch.bfloat16)

    write_model_directory(buckets(tensors(), int(shard_gb * 1e9)), folder, shape_only)
    return total


def same_bits(left: Path, right: Path) -> bool:
    """Whether two Hugging Face directories hold the same tensors."""
    where = {}
    for path in right.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            where.update(dict.fromkeys(file.keys(), path))
    for path in left.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                with safe_open(where.pop(name), framework="pt") as other:
                    a, b = file.get_tensor(name), other.get_tensor(name)
                    if not torch.equal(a.view(torch.int16), b.view(torch.int16)):
                        return False
    return not where


def convert(call: str) -> tuple[float, float, float]:
    """Seconds, peak resident gigabytes, and those before any work (the imports)."""
    # Not ru_maxrss, which a child inherits from the process that started it.
    code = (
        "import re,time;from pathlib import Path;"
        "from megatron_async.checkpoint.convert import hf_to_megatron as h, megatron_to_hf as m;"
        "peak=lambda:int(re.search(r'VmHWM:\\s+(\\d+)',Path('/proc/self/status').read_text())[1]);"
        "before=peak();t=time.monotonic();"
        f"{call};print(time.monotonic()-t, peak(), before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=3000
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    seconds, peak, before = map(float, done.stdout.split()[-3:])
    return seconds, peak * 1024 / 1e9, before * 1024 / 1e9


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--shard-gb", type=float, default=1.0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where there is room")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        began = time.monotonic()
        total = write_source(root / "hf", options.gigabytes, options.shard_gb)
        print(f"wrote {total / 1e9:.2f} GB in {time.monotonic() - began:.0f} s", flush=True)
        shard = max(path.stat().st_size for path in (root / "hf").glob("*.safetensors")) / 1e9
        table = Table(title=f"{total / 1e9:.2f} GB in files of at most {shard:.2f} GB")
        for column in ("direction", "seconds", "GB/s", "peak GB", "imports GB", "work / file"):
            table.add_column(column, justify="right")
        work = {
            f"hf-to-megatron tp{options.tp} pp{options.pp}": f"h({str(root / 'hf')!r},"
            f"{str(root / 'megatron')!r},tensor={options.tp},pipeline={options.pp})",
            "megatron-to-hf": f"m({str(root / 'megatron')!r},{str(root / 'back')!r},"
            f"max_shard_bytes={int(options.shard_gb * 1e9)})",
        }
        for direction, call in work.items():
            seconds, peak, before = convert(call)
            table.add_row(
                direction,
                f"{seconds:.1f}",
                f"{total / 1e9 / seconds:.2f}",
                f"{peak:.2f}",
                f"{before:.2f}",
                f"{(peak - before) / shard:.2f}",
            )
        print("bit-exact:", same_bits(root / "hf", root / "back"))
        Console(width=120).print(table)


if __name__ == "__main__":
    main()

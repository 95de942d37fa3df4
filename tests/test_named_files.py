"""Tests that files exist which documents, comments and scripts name, so that a moved file keeps no
stale names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"(?<![\w/.<{*-])((?:[\w-]+/)*[\w-]+\.(?:py|sh|sbatch|md))(?![\w*])")
READ = (".py", ".md", ".sh", ".sbatch", ".yaml", ".yml", ".toml")
OTHERS = {
    # Files of other projects.
    "CoPRIS_scripts/run_CoPRIS.sh",
    "arg_groups/field_order.py",
    "docs/algo/rollout_corr.md",
    "environ.py",
    "interfaces.py",
    "run/train_grpo.py",
    "sampling/sampling_params.py",
    "train_grpo_mbpp.py",
    "trl/trainer/grpo_trainer.py",
    "utils/patch_torch.py",
    "verl/trainer/ppo/rollout_corr_helper.py",
    # Files of a user, in examples.
    "file.py",
    "path/to/file.py",
    "program.py",
    "tests.py",
    "runner.py",
    "ask.py",
    "till.py",
    "agent.py",
    "random.py",
    "tokenizers.py",
    # Paths that start with a shell variable.
    "ROOT/launch/cluster_env.sh",
    "REPOSITORY/examples/smollm2/unpack.py",
    # Files that programs write.
    "job.sbatch",
    "reference/commands.md",
    "reference/settings.md",
    "benchmarks/results/engine.md",
    "benchmarks/results/slots.md",
}


def test_every_named_file_exists() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in done.stdout.splitlines() if (ROOT / name).exists()]
    ends = {"/".join(name.split("/")[i:]) for name in files for i in range(name.count("/") + 1)}
    missing = {
        f"{name}: {named}"
        for name in files
        if name.endswith(READ) and not name.startswith(("benchmarks/results/", "tests/"))
        for named in NAMED.findall((ROOT / name).read_text())
        if named not in ends | OTHERS and not named.startswith("my_")
    }
    assert not missing

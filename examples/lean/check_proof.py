"""Check a Lean 4 proof: `check_proof.py PROJECT` reads it on standard input, the row as row.json.

A proof counts when Lean accepts it in PROJECT (a Lake project with Mathlib), it contains the row's
own statement, and it uses neither `sorry` nor anything else that proves everything.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

FORBIDDEN = re.compile(r"\b(sorry|admit|axiom|unsafe|macro|elab|syntax|initialize|run_cmd)\b|#eval")
ENDING = re.compile(r"(:=\s*)?(by\s*)?(sorry\s*)?$")


def without_blanks(text: str) -> str:
    """Comments and blanks removed, so that layout does not matter."""
    return "".join(re.sub(r"/-.*?-/|--[^\n]*", "", text, flags=re.DOTALL).split())


def main(project: str) -> int:
    """Exit status 0 for a proof."""
    row = json.loads(Path("row.json").read_text())
    proof = sys.stdin.read()
    statement = ENDING.sub("", row["prompt"].rstrip())
    if FORBIDDEN.search(proof) or without_blanks(statement) not in without_blanks(proof):
        return 1
    header = "" if "import Mathlib" in proof else str(row.get("header", "import Mathlib\n"))
    checked = subprocess.run(
        ["lake", "env", "lean", "--stdin"],
        input=f"{header}\n{proof}\n",
        cwd=project,
        text=True,
        check=False,
    )
    return min(checked.returncode, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

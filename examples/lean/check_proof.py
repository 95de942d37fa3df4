"""Check a Lean 4 proof: `check_proof.py PROJECT`, with the proof on standard input.

The file row.json in the working directory contains the row. The exit status is 0 if all of these
conditions hold: Lean accepts the proof in PROJECT (a Lake project with Mathlib), the proof contains
the row's own statement, and it contains no word that `FORBIDDEN` matches. With such a word, for
example `sorry` or `axiom`, Lean could accept a proof of anything.
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
    """Return `text` without comments and white space, so that comparisons ignore the layout."""
    return "".join(re.sub(r"/-.*?-/|--[^\n]*", "", text, flags=re.DOTALL).split())


def main(project: str) -> int:
    """Return the exit status: 0 if Lean accepts the proof in `project`, else 1."""
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

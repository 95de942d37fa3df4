"""The command: `python -m benchmarks.mutations [--only NAME] [--list]`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.mutations import arithmetic, gpu_readiness, seventy_b
from benchmarks.mutations.mutation import Mutation
from benchmarks.mutations.runner import Outcome, counted, run

MUTATIONS: Final[tuple[Mutation, ...]] = (
    *arithmetic.MUTATIONS,
    *gpu_readiness.MUTATIONS,
    *seventy_b.MUTATIONS,
)
_SHOWN_CHARACTERS: Final = 1500


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 when every mutation was killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations")
    parser.add_argument(
        "--only", default="", help="mutations whose name starts with this: `loss_torch:`, `1.3`"
    )
    parser.add_argument("--list", action="store_true", help="print the mutations and stop")
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in MUTATIONS if mutation.name.startswith(options.only)]
    if options.list:
        print("\n".join(mutation.name for mutation in chosen))
        return 0
    started, outcomes = time.monotonic(), []
    for mutation, outcome in run(chosen):
        outcomes.append(outcome)
        _print(mutation, outcome)
    seconds = time.monotonic() - started
    print(f"{len(chosen)} mutations: {counted(outcomes)} ({seconds:.0f} s)")
    return 0 if all(outcome.result == "killed" for outcome in outcomes) else 1


def _print(mutation: Mutation, outcome: Outcome) -> None:
    print(f"{outcome.result:9s} {mutation.name}", flush=True)
    if outcome.noticed:
        print(f"          {outcome.noticed}: {outcome.why}", flush=True)
    if outcome.result in ("broken", "hung"):
        print(outcome.output[-_SHOWN_CHARACTERS:], flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

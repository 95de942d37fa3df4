"""Arguments and options that several commands of `megatron-async` have in common."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

ConfigOption = Annotated[
    Path | None, Option("--config", help="YAML file of the run (see configs/).")
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[SETTING=VALUE]...",
        help="Settings that override the file, e.g. schedule.concurrency=128 optimizer.lr=1e-6",
    ),
]
SetOption = Annotated[
    list[str] | None, Option("--set", help="SETTING=VALUE; may be given several times.")
]
Wide = Annotated[bool, Option("--wide", help="Every column, beyond 80 characters.")]
Assumptions = Annotated[
    bool, Option("--assumptions", help="Print every assumption, not only three.")
]
FromStep = Annotated[
    int | None,
    Option(help="With --resume: go on from the kept checkpoint of this step instead."),
]
Session = Annotated[
    str | None, Option(help="On several nodes: a new name, alike on all of them (launch/slurm).")
]
Index = Annotated[int, Option(help="This node's number from 0, with --session.")]
DryRun = Annotated[
    bool, Option("--dry-run", help="Check everything, show what would be done, make nothing.")
]

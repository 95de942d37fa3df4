"""torchrun, for the trainer ranks of this machine."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_async.engines.nodes import RENDEZVOUS_VARIABLE
from megatron_async.files.private_directory import private_directory, temporary_files
from megatron_async.process_backends.child_process import ChildProcess, after_fork, module_command


@contextmanager
def torchrun(
    ranks: int,
    module: str,
    *arguments: str,
    log_file: Path,
    environment: Mapping[str, str],
    max_restarts: int = 0,
    rendezvous: Sequence[str] | None = None,
) -> Iterator[ChildProcess]:
    """`torchrun` of this interpreter for this machine's ranks, ended with the block.

    `environment`: from `launcher.environment.trainer_environment`. `rendezvous`: the options by
    which it finds the agents of other machines (`launcher/session.py`). Without, its ranks meet by
    files: stores of torch would listen on every interface, to anybody.
    """
    with private_directory() as place:
        added = temporary_files(place, {**os.environ, **environment})
        environment = {**environment, **added}
        if rendezvous is None:
            environment = {**environment, RENDEZVOUS_VARIABLE: str(place)}
            rendezvous = (
                "--rdzv-backend=c10d",
                "--rdzv-id=run",
                "--local-addr=127.0.0.1",
                f"--rdzv-endpoint={place}/agent",
                "--rdzv-conf=store_type=file",
            )
        command = [
            *module_command("torch.distributed.run", *rendezvous),
            f"--nproc-per-node={ranks}",
            f"--max-restarts={max_restarts}",
            f"--log-dir={place}",
            "-m",
            module,
            *arguments,
        ]
        child = ChildProcess(
            command,
            log=log_file,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            preexec_fn=after_fork(signal.SIGTERM),
        )
        try:
            yield child
        finally:
            child.end()

"""Runs torchrun for the trainer ranks of this machine."""

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
    """Run torchrun, which starts this machine's ranks, with this Python interpreter for the
    duration of the block.

    Args:
        ranks: Number of ranks on this machine.
        module: Module that each rank runs.
        *arguments: Arguments of the module.
        log_file: File for the output of all ranks.
        environment: Variables from `launcher.environment.trainer_environment`.
        max_restarts: How often torchrun restarts all ranks after one failed.
        rendezvous: Options by which torchrun finds the torchrun agents of other machines, from
            `TrainerNode.rendezvous`. None if there are no other machines. The ranks then exchange
            their addresses through a file, because torch's network store would listen on every
            network interface.
    """
    with private_directory() as folder:
        added = temporary_files(folder, {**os.environ, **environment})
        environment = {**environment, **added}
        if rendezvous is None:
            environment = {**environment, RENDEZVOUS_VARIABLE: str(folder)}
            rendezvous = (
                "--rdzv-backend=c10d",
                "--rdzv-id=run",
                "--local-addr=127.0.0.1",
                f"--rdzv-endpoint={folder}/agent",
                "--rdzv-conf=store_type=file",
            )
        command = [
            *module_command("torch.distributed.run", *rendezvous),
            f"--nproc-per-node={ranks}",
            f"--max-restarts={max_restarts}",
            f"--log-dir={folder}",
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

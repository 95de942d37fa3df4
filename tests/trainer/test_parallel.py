"""Ranks meet at a port that torchrun chose seconds before; another process may have it by then."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from megatron_async.config.model import ParallelConfig, TrainerConfig
from megatron_async.errors import ComponentFailure
from megatron_async.trainer import parallel

JOIN = """
from megatron_async.config.model import ParallelConfig, TrainerConfig
from megatron_async.trainer.parallel import start_process_group
print("imported", flush=True)
start_process_group(ParallelConfig(), TrainerConfig())
print("joined")
"""


def taken_port() -> socket.socket:
    taken = socket.socket()
    taken.bind(("0.0.0.0", 0))
    taken.listen()
    return taken


def torchruns_variables(port: int) -> dict[str, str]:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_a_port_that_is_taken_for_a_moment_is_waited_for() -> None:
    with taken_port() as taken:
        variables = torchruns_variables(taken.getsockname()[1])
        rank = subprocess.Popen(
            [sys.executable, "-c", JOIN],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        assert rank.stdout is not None
        assert rank.stdout.readline() == "imported\n"
        time.sleep(2.0)  # several attempts
        assert rank.poll() is None
        taken.close()
        out, _ = rank.communicate(timeout=120)
    assert (rank.returncode, out) == (0, "joined\n")


def test_one_that_stays_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_PORT_SECONDS", 1.0)
    with taken_port() as taken:
        port = taken.getsockname()[1]
        for name, value in torchruns_variables(port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ComponentFailure, match=f"port {port} of 127.0.0.1, .* another process"):
            parallel.start_process_group(ParallelConfig(), TrainerConfig())
    assert not dist.is_initialized()

"""Tests the start of the process group when its port, which torchrun chose seconds before, is in
use by another process."""

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


def listening_socket() -> socket.socket:
    listening = socket.socket()
    listening.bind(("0.0.0.0", 0))
    listening.listen()
    return listening


def torchrun_variables(port: int) -> dict[str, str]:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_process_group_start_waits_when_its_port_is_briefly_in_use() -> None:
    with listening_socket() as listening:
        variables = torchrun_variables(listening.getsockname()[1])
        rank = subprocess.Popen(
            [sys.executable, "-c", JOIN],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        assert rank.stdout is not None
        assert rank.stdout.readline() == "imported\n"
        time.sleep(2.0)  # Enough for several attempts.
        assert rank.poll() is None
        listening.close()
        out, _ = rank.communicate(timeout=120)
    assert (rank.returncode, out) == (0, "joined\n")


def test_process_group_start_fails_when_its_port_stays_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "_PORT_SECONDS", 1.0)
    with listening_socket() as listening:
        port = listening.getsockname()[1]
        for name, value in torchrun_variables(port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ComponentFailure, match=f"port {port} of 127.0.0.1, .* another process"):
            parallel.start_process_group(ParallelConfig(), TrainerConfig())
    assert not dist.is_initialized()

"""Tests that only processes with the run's token can use Ray, which listens on every interface."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_async.engines.nodes import node_address

pytestmark = pytest.mark.slow
JOINER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("nodes", len(ray.nodes()))
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """Start a run's Ray; return its address in the network, and the file of its token."""
    import ray

    from megatron_async.process_backends.ray_cluster import start_ray

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        # A variable that was set here is restored by monkeypatch after the test.
        monkeypatch.setenv(name, "")
    key_file = tmp_path / "ray-token"
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(modes_until, started := threading.Event())
        try:
            address = start_ray(key_file)
        finally:
            started.set()
    try:
        assert watching.result() == {0o700}, "other users could access the sockets for a while"
        yield f"{node_address()}:{address.rpartition(':')[2]}", key_file
    finally:
        ray.shutdown()


def modes_until(started: threading.Event) -> set[int]:
    """Return the modes of the directory around Ray's sockets until `started` is set."""
    found = set()
    while not started.wait(0.002):
        with suppress(FileNotFoundError):
            found.add(stat.S_IMODE(Path(f"/tmp/ray-{os.getuid()}").stat().st_mode))
    return found


def joined(address: str, home: Path, environments: Sequence[dict[str, str]]) -> list[bool]:
    """Return for each of `environments` whether a process with it can use the cluster."""
    own = {"PATH": os.environ["PATH"], "HOME": str(home)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", JOINER, address],
            env={**own, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for environment in environments
    ]
    return ["nodes 1" in process.communicate(timeout=180)[0] for process in running]


def test_only_the_token_gives_access_to_a_local_ray_cluster(
    started: tuple[str, Path], tmp_path: Path
) -> None:
    address, key_file = started
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    other = tmp_path / "other-token"
    other.write_text("0" * 64)
    strangers = [
        {},
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(other)},
    ]
    owner = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(key_file)}
    assert joined(address, tmp_path, [*strangers, owner]) == [False, False, False, True]


def test_ray_token_is_in_no_command_line_and_no_log(started: tuple[str, Path]) -> None:
    _, key_file = started
    key = key_file.read_text()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert key.encode() not in (process / "cmdline").read_bytes(), process
        except OSError:
            continue  # The process has ended.
    from megatron_async.process_backends.ray_cluster import ray_directory

    # All sessions are searched, because the newest may be another run's.
    found = ray_directory().glob("session_[0-9]*/logs/**/*")
    texts = [path for path in found if path.is_file()]
    assert texts
    assert not [path for path in texts if key.encode() in path.read_bytes()]

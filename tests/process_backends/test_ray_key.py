"""Ray on one machine listens on every interface: only who holds the run's key can use it."""

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
STRANGER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("nodes", len(ray.nodes()))
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """The address of a run's Ray, as others reach this machine, and the file of its key."""
    import ray

    from megatron_async.process_backends.ray_cluster import start_ray

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # restored after the test
    key_file = tmp_path / "ray-token"
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(modes_until, started := threading.Event())
        try:
            address = start_ray(key_file)
        finally:
            started.set()
    try:
        assert watching.result() == {0o700}, "others could reach the sockets for a while"
        yield f"{node_address()}:{address.rpartition(':')[2]}", key_file
    finally:
        ray.shutdown()


def modes_until(started: threading.Event) -> set[int]:
    """Modes that the directory around Ray's sockets has had meanwhile."""
    found = set()
    while not started.wait(0.002):
        with suppress(FileNotFoundError):
            found.add(stat.S_IMODE(Path(f"/tmp/ray-{os.getuid()}").stat().st_mode))
    return found


def joined(address: str, home: Path, environments: Sequence[dict[str, str]]) -> list[bool]:
    """Whether a process with nothing but each of `environments` can use the cluster."""
    own = {"PATH": os.environ["PATH"], "HOME": str(home)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", STRANGER, address],
            env={**own, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for environment in environments
    ]
    return ["nodes 1" in process.communicate(timeout=180)[0] for process in running]


def test_only_the_key_opens_a_run_on_one_machine(started: tuple[str, Path], tmp_path: Path) -> None:
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


def test_the_key_is_in_no_command_line_and_no_log(started: tuple[str, Path]) -> None:
    _, key_file = started
    key = key_file.read_text()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert key.encode() not in (process / "cmdline").read_bytes(), process
        except OSError:
            continue  # it has ended
    from megatron_async.process_backends.ray_cluster import ray_directory

    # Of every session: the newest may be another run's.
    found = ray_directory().glob("session_[0-9]*/logs/**/*")
    texts = [path for path in found if path.is_file()]
    assert texts
    assert not [path for path in texts if key.encode() in path.read_bytes()]

"""Tests that the sandbox contains hostile programs: runs each, and looks for effects outside."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_async.config.reward import SandboxConfig
from megatron_async.errors import UserError
from megatron_async.scoring.sandbox import Outcome, Sandbox

LIMITS = SandboxConfig(memory_mib=128, disk_mib=16, processes=12)
SECONDS = 20.0  # Far longer than any program takes, because machines that run tests are busy.
NAMESPACES = "namespaces"


PYTHON = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
"""A Python interpreter that other users may run too; root's own may be inaccessible to them."""


class WithoutNamespaces(Sandbox):
    """A sandbox as on a machine that forbids namespaces."""

    def _problem(self) -> str:
        return "Operation not permitted" if self._namespaces else ""


@pytest.fixture(scope="module", params=[NAMESPACES, "limits"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "limits":
        return WithoutNamespaces(LIMITS)
    found = Sandbox(LIMITS)
    if found.missing:
        pytest.skip(found.missing)
    return found


@pytest.fixture(scope="module")
def isolated() -> Sandbox:
    found = Sandbox(LIMITS)
    if found.missing:
        pytest.skip(found.missing)
    return found


def run(sandbox: Sandbox, program: str, seconds: float = SECONDS) -> Outcome:
    """Run a Python program in the sandbox."""
    return sandbox.run([PYTHON, "-I", "-S", "p.py"], {"p.py": program}, seconds)


def remaining(mark: str) -> list[psutil.Process]:
    """Wait up to 30 s until no process has `mark` in its command line; return those that have."""
    deadline = time.monotonic() + 30.0
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if any(mark in argument for argument in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def test_sandbox_reports_output_and_exit_status_of_program(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "import sys; print(open('p.py').read()[:6]); sys.exit(3)")
    assert (outcome.exit_code, outcome.exceeded, outcome.output) == (3, "", "import\n")
    echo = sandbox.run(["cat"], {}, SECONDS, stdin="back")
    assert echo.output == "back"
    killed = run(sandbox, "import os; os.kill(os.getpid(), 9)")
    assert killed.exit_code == 137
    missing = sandbox.run(["no-such-program"], {}, SECONDS)
    assert missing.exit_code == 127 and "no-such-program cannot be run" in missing.errors


def test_sandbox_ends_all_processes_of_fork_bomb(sandbox: Sandbox) -> None:
    mark = f"bomb-{os.getpid()}"
    bomb = f"'{mark}'\nimport os, time\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    began = time.monotonic()
    outcome = sandbox.run([PYTHON, "-I", "-S", "-c", bomb], {}, 3.0)
    assert outcome.exit_code != 0 and time.monotonic() - began < 60.0
    assert remaining(mark) == []


def test_sandbox_refuses_memory_when_one_process_exceeds_limit(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "block = bytearray(1 << 30)\nprint('got it')")
    assert outcome.exit_code == 1 and "MemoryError" in outcome.errors


def test_sandbox_ends_program_when_processes_together_exceed_memory(sandbox: Sandbox) -> None:
    program = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        block = b'x' * (60 << 20)\n"
        "        time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    assert run(sandbox, program).exceeded == "memory"


def test_sandbox_refuses_memory_that_belongs_to_no_process(sandbox: Sandbox) -> None:
    """Such memory is files in memory, System V memory, and mounts in a new namespace."""
    program = (
        "import ctypes, os, platform, threading\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def ask(name, *arguments):\n"
        "    got = getattr(libc, name)(*arguments)\n"
        "    print(name, 'refused' if got == -1 and ctypes.get_errno() == 1 else got)\n"
        "ask('memfd_create', b'x', 0)\n"
        "ask('shmget', 0, 1 << 20, 0o1600)\n"
        "ask('msgget', 0, 0o1600)\n"
        "ask('unshare', 0x10000000)\n"
        "clone = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
        "ask('syscall', clone, 0x10000000 | 17, 0, 0, 0, 0)\n"
        "thread = threading.Thread(target=print, args=('a thread',))\n"
        "thread.start(); thread.join()\n"
    )
    calls = ("memfd_create", "shmget", "msgget", "unshare", "syscall")
    expected = [*(f"{name} refused" for name in calls), "a thread"]
    assert run(sandbox, program).output.splitlines() == expected


def test_sandbox_ends_program_when_it_prints_forever(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "while True: print('x' * 1000)")
    assert outcome.exceeded == "output" and len(outcome.output) <= 64 << 10


def test_sandbox_ends_program_when_it_runs_forever(sandbox: Sandbox) -> None:
    mark = f"endless-{os.getpid()}"
    outcome = sandbox.run([PYTHON, "-c", f"'{mark}'\nwhile True: pass"], {}, 0.5)
    assert outcome.exceeded == "seconds" or outcome.exit_code == 152  # SIGXCPU
    assert remaining(mark) == []


def test_sandbox_refuses_writes_when_disk_limit_is_reached(isolated: Sandbox) -> None:
    outcome = run(isolated, "open('a', 'wb').write(b'x' * (1 << 25))")
    assert outcome.exit_code != 0
    many = "for i in range(9): open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 22))"
    outcome = run(isolated, many)
    assert outcome.exit_code == 1 and "No space left" in outcome.errors


def test_sandbox_hides_files_of_the_machine(isolated: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "store.sqlite"
    secret.write_text("secret")
    secret.chmod(0o644)
    for path in (secret, Path.home(), Path("/etc/passwd"), Path("/proc/1/environ")):
        outcome = run(isolated, f"import pathlib\nprint(pathlib.Path({str(path)!r}).read_text())")
        assert outcome.exit_code == 1 and "secret" not in outcome.output, path


def test_sandbox_hides_environment_and_descriptors_of_scorer(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    program = (
        "import os\n"
        "opened = []\n"
        "for fd in range(64):\n"
        "    try: os.fstat(fd); opened.append(fd)\n"
        "    except OSError: pass\n"
        "print('API_KEY' in os.environ, opened)\n"
    )
    assert run(sandbox, program).output == "False [0, 1, 2]\n"


def test_sandbox_prevents_writing_outside_its_folder(isolated: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    readable = SandboxConfig(readable=[str(tmp_path)])
    outcome = run(Sandbox(readable), f"open({str(tmp_path / 'mine')!r}, 'w').write('x')")
    assert outcome.exit_code == 1 and "Read-only file system" in outcome.errors
    for path in ("/tmp/megatron-async-mine", f"{sys.prefix}/megatron-async-mine"):
        run(isolated, f"open({path!r}, 'w').write('x')")
        assert not Path(path).exists()


def test_sandbox_prevents_network_connections(isolated: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nprint('in')"
        outcome = run(isolated, program)
        assert outcome.exit_code == 1 and "in" not in outcome.output
        with pytest.raises(TimeoutError):
            server.accept()


def test_sandbox_keeps_working_when_program_kills_its_parents(sandbox: Sandbox) -> None:
    program = (
        "import os, signal\n"
        f"for pid in (os.getppid(), {os.getpid()}, -1):\n"
        "    try: os.kill(pid, signal.SIGKILL)\n"
        "    except OSError as error: print(type(error).__name__)\n"
        "print('still here')\n"
    )
    outcome = run(sandbox, program)
    assert outcome.exit_code in (0, 137) and not outcome.exceeded
    assert run(sandbox, "print('next')").output == "next\n"


def test_sandbox_kills_child_that_survives_program(sandbox: Sandbox) -> None:
    mark = f"child-{os.getpid()}"
    program = (
        "import os, sys\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for fd in range(3): os.close(fd)\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', '\"{mark}\"; import time; "
        "time.sleep(600)'])\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print('done')\n"
    )
    outcome = run(sandbox, program)
    assert outcome.output == "done\n" and outcome.exit_code == 0
    assert remaining(mark) == []


def test_sandbox_leaves_no_process_when_scorer_is_killed(isolated: Sandbox) -> None:
    mark = f"orphan-{os.getpid()}"
    child = os.fork()
    if child == 0:
        isolated.run([PYTHON, "-c", f"'{mark}'\nwhile True: pass"], {}, 600.0)
        os._exit(0)
    killer = threading.Timer(1.0, os.kill, (child, 9))
    killer.start()
    os.waitpid(child, 0)
    killer.join()
    assert remaining(mark) == []


def test_sandbox_lifts_address_space_limit_of_scorer(sandbox: Sandbox) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, hard))
    try:
        program = "import resource; print(resource.getrlimit(resource.RLIMIT_AS))"
        assert run(sandbox, program).output == f"{(hard, hard)}\n"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_sandbox_removes_its_files(sandbox: Sandbox) -> None:
    folder = run(sandbox, "import os; print(os.getcwd())").output.strip()
    assert folder == "/box" or not Path(folder).exists()


def test_sandbox_reports_or_refuses_when_namespaces_are_forbidden() -> None:
    assert "reach the network" in WithoutNamespaces(LIMITS).missing
    with pytest.raises(UserError, match=r"scoring\.sandbox\.required is true, and programs"):
        WithoutNamespaces(LIMITS.model_copy(update={"required": True}))

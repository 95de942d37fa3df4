"""Provides fixtures that several test folders share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.small_disk import SmallDisk, small_disk

if TYPE_CHECKING:
    from tests.engine import EngineUnderTest

# No test may depend on the speed of the machine, because a first call may import or compile.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")

# A shell starts background processes with SIGINT ignored, and child processes inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def sglang_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """Provide one SGLang CPU server for the session; each test must start with
    `sglang_engine.reset_to("a")`."""
    pytest.importorskip("sglang")
    from tests.engine import start_engine

    engine = start_engine(tmp_path_factory.mktemp("sglang_engine"))
    try:
        yield engine
    finally:
        engine.process.stop()


@pytest.fixture(params=[0o022, 0o002, 0o027], ids=oct)
def new_file_mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the umask for the test; return the mode that a new file has under it."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Provide a disk of eight megabytes that a test may fill or make read-only."""
    with small_disk(tmp_path / "disk", 8 << 20) as found:
        yield found

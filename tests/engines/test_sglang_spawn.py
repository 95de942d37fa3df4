"""A real server whose scheduler is spawned, as it is on GPUs, with the arguments of a run.

On a CPU the scheduler is forked and has all that the server has set up. A spawned one begins anew:
its arguments are pickled, and the hooks are there only if the main module installs them again.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from megatron_async.engines.interface import TokenChunk
from megatron_async.trajectory.types import PolicyVersion
from tests.engine import collect, make_request, start_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Every Python process imports it first: no other start method, and a file for each spawned one.
SITE = """
import multiprocessing, os, pathlib, sys

set_start_method = multiprocessing.set_start_method
multiprocessing.set_start_method = lambda method, force=False: set_start_method("spawn", force=True)
if "--multiprocessing-fork" in sys.orig_argv:
    pathlib.Path(__file__).with_name(str(os.getpid())).touch()
"""


def test_a_spawned_scheduler_has_our_hooks_and_takes_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    engine = start_engine(tmp_path)
    try:
        assert engine.process.pid is not None
        children = psutil.Process(engine.process.pid).children(recursive=True)
        [scheduler] = [child for child in children if child.name() == "sglang::scheduler"]
        assert (site / str(scheduler.pid)).exists(), "it was not spawned"
        engine.hold("b", PolicyVersion(3, 7))
        request = make_request("r", [5, 9, 17, 3], 50)
        chunks: list[TokenChunk] = engine.run(lambda client: collect(client, request))
        assert {chunk.version for chunk in chunks} == {PolicyVersion(3, 7)}
        assert len(chunks) > 2, "without the hook a version is known at the end only"
    finally:
        engine.process.stop()

"""A run on one machine: what listens for connections is what docs/clusters.md lists; no Ray."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.end_to_end.test_nothing_left import Started
from tests.listening import documented, kind_of, listening


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_listens_where_the_page_lists_it_and_has_no_ray(tmp_path: Path) -> None:
    run = Started(tmp_path)
    try:
        processes = [psutil.Process(run.process.pid), *run.family]
        found, kinds = listening(processes), {kind_of(process) for process in processes}
    finally:
        run.process.terminate()
        run.process.wait(60)
    assert found == documented()
    assert {where for _, where in found} == {"loopback"}
    assert kinds >= {"`train`", "rollout manager", "host of an engine", "engine", "trainer rank"}
    assert "Ray" not in kinds

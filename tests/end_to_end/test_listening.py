"""What of a run on one machine listens for connections is what docs/clusters.md lists."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.end_to_end.test_nothing_left import Started
from tests.listening import documented, listening


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_listens_where_the_page_lists_it(tmp_path: Path) -> None:
    run = Started(tmp_path)
    try:
        found = listening([psutil.Process(run.process.pid), *run.family])
    finally:
        run.process.terminate()
        run.process.wait(60)
    assert found == documented()
    assert {where for _, where in found} == {"loopback"}

"""Imports are not searched for garbage, and a process that is not searched at all stays so."""

from __future__ import annotations

import gc

import pytest

from megatron_async.runtime.garbage_collection import gc_disabled


@pytest.mark.parametrize("searched", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_searches_go_on_as_before_imports(searched: bool, frozen: bool) -> None:
    before = gc.get_freeze_count()
    try:
        (gc.enable if searched else gc.disable)()
        with pytest.raises(ImportError), gc_disabled(frozen=frozen):
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == searched
        assert (gc.get_freeze_count() > before) == frozen
    finally:
        gc.unfreeze()
        gc.enable()

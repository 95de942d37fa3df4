"""Tests that garbage collection is disabled during imports and restored after them."""

from __future__ import annotations

import gc

import pytest

from megatron_async.runtime.garbage_collection import gc_disabled


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_garbage_collection_is_restored_after_an_import_that_fails(
    enabled: bool, frozen: bool
) -> None:
    before = gc.get_freeze_count()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError), gc_disabled(frozen=frozen):
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
        assert (gc.get_freeze_count() > before) == frozen
    finally:
        gc.unfreeze()
        gc.enable()

"""What a run writes down about its machine."""

import ctypes
import sys

import pytest

from feddg.runs.prepare import give_memory_back


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own function")
def test_freed_memory_is_given_back():
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    pieces = [bytearray(2_000) for _ in range(20_000)]
    kept = pieces[::500]  # holes of a megabyte between them
    del pieces
    assert give_memory_back()
    assert kept

"""What this process holds, counted rather than measured: the machine's other programs, and when pages are given back, change nothing."""

from __future__ import annotations

import ctypes
import gc
import sys

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
BLOCK = 64  # bytes of one of Python's own objects, about


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _Counts


def held() -> int:
    """Bytes that malloc and Python have given out and not got back. Each thread's cache of freed pieces counts: up to 300 KB."""
    gc.collect()
    now = _mallinfo2()
    return int(now.uordblks + now.hblkhd + BLOCK * sys.getallocatedblocks())

"""Memory of a worker that reads megabytes after megabytes: what was freed serves the next ones.

The allocator of glibc takes large blocks from the kernel one by one and gives each of them back. Then every page of
every range is cleared and mapped anew, which costs as much as reading it.

Invariants
- A worker keeps at most `_KEPT_BYTES` at the end of its heap that nobody uses.
- Where the allocator is another one, nothing is changed.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

# As malloc.h numbers them.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# The most that older versions of glibc accept; ranges and columns of a batch are smaller.
_LARGEST_IN_HEAP_BYTES = 32 << 20
_KEPT_BYTES = 64 << 20


@lru_cache(1)
def keep_memory() -> bool:
    """Once in a worker; whether its allocator could be told."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))

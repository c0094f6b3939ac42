"""The record of a put in one step: the C kernel, or its twin where that could not be built.

There are more puts than anything else, and each needs a key, a body with its checksum, a cell, a page update and a
record around them all: one call each in place of ten.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tidelog.engine import record_python

if TYPE_CHECKING:
    _kernel = record_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.engine import _record as _kernel
    except ImportError:
        _kernel = record_python

KERNEL_IS_NATIVE = _kernel is not record_python

object_key = _kernel.object_key
plain_data = _kernel.plain_data
put_record = _kernel.put_record

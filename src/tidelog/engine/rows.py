"""Rows of blocks without a Python object for each: the C kernel, or its twin where that could not be built.

    check_rows(raw, count, after_key, has_places)          the last key; DataError when they are not sound
    find_row(raw, key)                                     the first row that is not before a key
    merge_rows(sources, drops_removed)                     several blocks as one, as far as the shortest of them goes
    fill_page(page, raw, at, reserved_bytes, lsn)          rows into a page of the tree

`has_places` says that values are those of the version index (`place`): then only their cells are taken.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tidelog.engine import rows_python

if TYPE_CHECKING:
    _kernel = rows_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.engine import _engine as _kernel
    except ImportError:
        _kernel = rows_python

Source = rows_python.Source

check_rows = _kernel.check_rows
find_row = _kernel.find_row
merge_rows = _kernel.merge_rows
fill_page = _kernel.fill_page

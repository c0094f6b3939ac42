"""Looking over records without decoding them: the C kernel, or its twin where that could not be built."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tidelog.engine import survey_python

if TYPE_CHECKING:
    _kernel = survey_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.engine import _engine as _kernel
    except ImportError:
        _kernel = survey_python

survey = _kernel.survey

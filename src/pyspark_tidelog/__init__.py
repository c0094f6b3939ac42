"""Spark looks for modules named like this one, so `format("tidelog")` is known wherever tidelog is installed.

Spark imports every such module before it looks up the first format it does not know, in any program of the user. So
this one must never fail: where the source cannot be imported (no Arrow), it has no `DefaultSource`, and Spark goes on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.pipeline.source.topics import TidelogDataSource as DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> object:
    """`DefaultSource`, imported when it is asked for."""
    return default_source(__name__, name, "tidelog.pipeline.source.topics", "TidelogDataSource")


def default_source(module: str, name: str, source_module: str, source: str) -> object:
    """What a module for Spark has under a name; AttributeError if that is nothing, or cannot be imported."""
    if name != "DefaultSource":
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(source_module), source)
    except ImportError as error:
        raise AttributeError(f"{module}.{name} cannot be imported: {error}") from error

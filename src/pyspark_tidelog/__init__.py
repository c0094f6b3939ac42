"""Spark looks for modules named like this one, so `format("tidelog")` is known wherever tidelog is installed.

Spark imports every such module before it looks up the first format it does not know, in any program of the user. So
this one must never fail: where the source cannot be imported (no Arrow), it has no `DefaultSource`, and Spark goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.pipeline.source.topics import TidelogDataSource as DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> object:
    """`DefaultSource`, imported when it is asked for."""
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tidelog.pipeline.source.topics import TidelogDataSource
    except ImportError as error:
        raise AttributeError(f"{__name__}.{name} cannot be imported: {error}") from error
    return TidelogDataSource

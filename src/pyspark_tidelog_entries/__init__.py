"""Spark looks for modules named like this one, so `format("tidelog_entries")` is known wherever tidelog is installed.

As `pyspark_tidelog`, it never fails: where the source cannot be imported (no Arrow), it has no `DefaultSource`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark_tidelog import default_source

if TYPE_CHECKING:
    from tidelog.pipeline.source.entries import EntriesDataSource as DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> object:
    """`DefaultSource`, imported when it is asked for."""
    return default_source(__name__, name, "tidelog.pipeline.source.entries", "EntriesDataSource")

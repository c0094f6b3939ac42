"""The settings as keywords, so that editors show them: `tidelog.open(rotate_max_bytes="64MiB")`.

A test holds them against the settings themselves, which stay the one place where a setting is explained.
"""

from __future__ import annotations

from tidelog.engine.settings import EngineOptions
from tidelog.log.settings import LogOptions
from tidelog.tier.store_settings import StoreOptions
from tidelog.tier.tier_settings import TierOptions


class OpenOptions(LogOptions, TierOptions, StoreOptions, total=False):
    """What `tidelog.open` takes besides its named arguments."""

    metadata_root: str
    lease_seconds: float | str


class OpenEngineOptions(EngineOptions, StoreOptions, total=False):
    """What `tidelog.open_engine` and `tidelog.restore_engine` take besides their named arguments."""

    lease_seconds: float | str
    ownership_check_seconds: float | str

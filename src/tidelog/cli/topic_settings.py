"""A topic's own settings on the command line: `retention_seconds=7d`, `ship_compression=default`.

Invariants
- Values are read as those of the settings file are, units included, and a wrong one is refused before anything is made.
- Changing them claims nothing: a topic with a store has them in its catalog, and they count from its next opening on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tidelog.config import Settings
from tidelog.config.settings import settings_of
from tidelog.config.sources import Given
from tidelog.config.values import convert
from tidelog.errors import ConfigError, InputError
from tidelog.files import LocalFiles
from tidelog.tier import owner as documents
from tidelog.tier.metadata.store import Check, Put
from tidelog.tier.tier_settings import TierSettings
from tidelog.topics.topic_info import read_topic_info, with_own

if TYPE_CHECKING:
    from tidelog.tier.catalog import Catalog

_DEFAULT = "default"


def parse_own_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` each; the value `default` takes a setting back, and is None here."""
    parsed: dict[str, Any] = {}
    for text in texts:
        name, found, value = text.partition("=")
        if not found or not name or not value:
            raise InputError(f"{text!r} is not NAME=VALUE", hint="For example: retention_seconds=7d")
        if name in parsed:
            raise InputError(f"the setting {name} is given twice")
        parsed[name] = None if value == _DEFAULT else _converted(name, value)
    with_own(TierSettings(), parsed)  # names that are none of a topic's are refused here
    return parsed


def _converted(name: str, value: str) -> object:
    with_own(TierSettings(), {name: None})
    return convert(Given(settings_of(Settings)[name], value, name, is_text=True))


def own_settings(catalog: Catalog | None, directory: Path) -> dict[str, object]:
    """Those that a topic has for itself: the catalog's, else those in its directory."""
    entry = None if catalog is None else catalog.metadata.get(catalog.keys.settings)
    if entry is not None:
        return documents.decode_mapping(entry.value, entry.key)
    info = read_topic_info(LocalFiles(), directory) if directory.is_dir() else None
    return {} if info is None else dict(info.settings)


def change_in_catalog(catalog: Catalog, directory: Path, changes: Mapping[str, object]) -> dict[str, object]:
    """Keeps the changed settings where the next owner looks; ConflictError if somebody else does so just now."""
    info = read_topic_info(LocalFiles(), directory) if directory.is_dir() else None
    if info is not None and not info.reliable:
        raise ConfigError(f"{info.name} has reliable=False and keeps no messages: there is nothing to set")
    entry = catalog.metadata.get(catalog.keys.settings)
    own = {**own_settings(catalog, directory), **changes}
    own = {name: value for name, value in own.items() if value is not None}
    with_own(TierSettings(), own)
    check = Check(catalog.keys.settings, None if entry is None else entry.version)
    catalog.metadata.commit([check], [Put(catalog.keys.settings, msgspec.json.encode(own))])
    return own

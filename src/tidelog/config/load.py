"""From the three sources to one `Settings`; the later source wins, setting by setting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tidelog.config.settings import Settings, settings_of, tables_of
from tidelog.config.sources import CONFIG_VARIABLE, Given, from_environment, from_file, from_keywords
from tidelog.config.values import convert

SettingsType = TypeVar("SettingsType", bound=Settings)


def load_settings(
    config: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings of this process; ConfigError names the place, the value and what was expected.

    `config` defaults to TIDELOG_CONFIG, `environment` to that of the process.
    """
    return load_as(Settings, config, os.environ if environment is None else environment, overrides or {})


def load_as(
    settings_type: type[SettingsType],
    config: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, object],
) -> SettingsType:
    """`load_settings` for a subclass with more tables."""
    known = settings_of(settings_type)
    config = config or environment.get(CONFIG_VARIABLE)
    given = from_file(known, Path(config), environment) if config else {}
    given |= from_environment(known, environment)
    given |= from_keywords(known, overrides)
    return _build(settings_type, given)


def _build(settings_type: type[SettingsType], given: Mapping[str, Given]) -> SettingsType:
    top: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {table: {} for table in tables_of(settings_type)}
    for name, one in given.items():
        owner = top if one.setting.table is None else tables[one.setting.table]
        owner[name] = convert(one)
    for table, struct in tables_of(settings_type).items():
        top[table] = struct(**tables[table])
    return settings_type(**top, hidden_names=frozenset(name for name, one in given.items() if one.is_hidden))

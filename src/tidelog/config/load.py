"""From the three sources to one `Settings`; the later source wins, setting by setting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tidelog.config.settings import Settings, describe, settings_of, tables_of
from tidelog.config.sources import CONFIG_VARIABLE, Given, from_environment, from_file, from_keywords
from tidelog.config.values import convert
from tidelog.errors import ConfigError

SettingsType = TypeVar("SettingsType", bound=Settings)

# (must not be less than, this one; what would happen otherwise)
_RULES = (("handover_max_bytes", "max_message_bytes", "one message could be larger than all that may wait"),)


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
    settings = _build(settings_type, given)
    _check_rules(settings, given)
    return settings


def _build(settings_type: type[SettingsType], given: Mapping[str, Given]) -> SettingsType:
    top: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {table: {} for table in tables_of(settings_type)}
    for name, one in given.items():
        owner = top if one.setting.table is None else tables[one.setting.table]
        owner[name] = convert(one)
    for table, struct in tables_of(settings_type).items():
        top[table] = struct(**tables[table])
    return settings_type(**top, hidden_names=frozenset(name for name, one in given.items() if one.is_hidden))


def _check_rules(settings: Settings, given: Mapping[str, Given]) -> None:
    """What holds between two settings."""
    known, shown = settings_of(type(settings)), describe(settings)
    for larger, smaller, otherwise in _RULES:
        if known[larger].value_in(settings) >= known[smaller].value_in(settings):
            continue
        first, second = (f"{name} ({shown[name]}, from {_origin(given.get(name))})" for name in (larger, smaller))
        raise ConfigError(f"{first} is less than {second}: {otherwise}", hint=f"Raise {larger} or lower {smaller}")


def _origin(given: Given | None) -> str:
    if given is None:
        return "its default"
    return given.place if given.path is None else f"{given.place} in {given.path}"

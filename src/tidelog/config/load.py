"""From the three sources to one `Settings`; the later source wins, setting by setting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tidelog.config.settings import EngineConfig, Setting, Settings, describe, settings_of, tables_of
from tidelog.config.sources import CONFIG_VARIABLE, Given, from_environment, from_file, from_keywords
from tidelog.config.values import convert

_SHARED_WITH_ENGINES = ("dir", "store", "lease_seconds", "ownership_check_seconds")
SettingsType = TypeVar("SettingsType", bound=Settings)


def load_settings(
    config: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings of this process; ConfigError names the place, the value and what was expected.

    `config` defaults to TIDELOG_CONFIG, `environment` to that of the process.
    """
    known = settings_of(Settings)
    elsewhere = dict.fromkeys(settings_of(EngineConfig).keys() - known, "It is for an engine: tidelog.open_engine")
    environment = os.environ if environment is None else environment
    given = _given(settings_of(EngineConfig), config, environment)
    given |= from_keywords(known, overrides or {}, elsewhere)
    _build(EngineConfig, given)  # what a file says about engines is checked, whoever reads it first
    return _build(Settings, {name: one for name, one in given.items() if name in known})


def load_engine_config(
    config: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> EngineConfig:
    """As `load_settings`, for whoever opens an engine. Keywords are an engine's and those of its store."""
    known = settings_of(EngineConfig)
    accepted = {name: setting for name, setting in known.items() if _is_for_engines(setting)}
    elsewhere = dict.fromkeys(known.keys() - accepted, "It is for topics: tidelog.open")
    given = _given(known, config, os.environ if environment is None else environment)
    given |= from_keywords(accepted, overrides or {}, elsewhere)
    return _build(EngineConfig, given)


class InForce(NamedTuple):
    """A setting, its value (hidden if it must not be seen) and where that comes from."""

    name: str
    table: str | None
    value: object
    source: str


def explain_settings(
    config: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, object],
) -> list[InForce]:
    """Every setting that is in force here, topics' and engines', in the order in which they are documented."""
    known = settings_of(EngineConfig)
    given = _given(known, config, environment)
    sources = {name: f"{one.path}" if one.path is not None else one.place for name, one in given.items()}
    overriding = from_keywords(known, overrides, {})
    sources |= dict.fromkeys(overriding, "command line")
    shown = describe(_build(EngineConfig, given | overriding))
    return [InForce(name, known[name].table, value, sources.get(name, "default")) for name, value in shown.items()]


def _is_for_engines(setting: Setting) -> bool:
    return setting.table in ("storage_engine", "object_store") or setting.name in _SHARED_WITH_ENGINES


def load_as(
    settings_type: type[SettingsType],
    config: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, object],
) -> SettingsType:
    """`load_settings` for a subclass with more tables."""
    known = settings_of(settings_type)
    return _build(settings_type, _given(known, config, environment) | from_keywords(known, overrides, {}))


def _given(
    known: Mapping[str, Setting], config: str | os.PathLike[str] | None, environment: Mapping[str, str]
) -> dict[str, Given]:
    """What the file and the environment say."""
    config = config or environment.get(CONFIG_VARIABLE)
    given = from_file(known, Path(config), environment) if config else {}
    return given | from_environment(known, environment)


def _build(settings_type: type[SettingsType], given: Mapping[str, Given]) -> SettingsType:
    top: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {table: {} for table in tables_of(settings_type)}
    for name, one in given.items():
        owner = top if one.setting.table is None else tables[one.setting.table]
        owner[name] = convert(one)
    for table, struct in tables_of(settings_type).items():
        top[table] = struct(**tables[table])
    return settings_type(**top, hidden_names=frozenset(name for name, one in given.items() if one.is_hidden))

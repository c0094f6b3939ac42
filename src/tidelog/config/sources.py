"""The three places where settings are given: a TOML file, the environment, keywords.

Here it is settled which setting is meant, and where in an error to point; what the value has to be is `values.py`.
An empty variable counts as one that is not set, and a keyword that is None as one that was not given.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tidelog.config.settings import Setting
from tidelog.errors import ConfigError
from tidelog.secret import HIDDEN

PREFIX = "TIDELOG_"
CONFIG_VARIABLE = "TIDELOG_CONFIG"
# Ours, but read elsewhere.
_OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "TIDELOG_PURE_PYTHON"})
# Kubernetes sets these in every pod next to a service that is called "tidelog"; nobody chose them.
_SERVICE_LINK = re.compile(r"TIDELOG_(SERVICE_(HOST|PORT)(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_REFERENCE = re.compile(r"\$?\$\{([^}]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHOWN_CHARACTERS = 60


class Given(NamedTuple):
    """A value as somebody gave it, and how to name the place in an error."""

    setting: Setting
    value: object
    place: str
    path: Path | None = None
    is_text: bool = False  # it came as text whatever its type, so numbers and truth values are read out of it
    is_hidden: bool = False

    def __repr__(self) -> str:
        """For tracebacks that print local variables."""
        return f"{type(self).__name__}({self.place}: {self.shown})"

    def error(self, problem: str, hint: str | None = None) -> ConfigError:
        """Points at the place."""
        return ConfigError(f"{self.place} {problem}", path=self.path, hint=hint)

    @property
    def shown(self) -> str:
        """The value for an error, if it may be seen."""
        if self.is_hidden or self.setting.is_secret:
            return HIDDEN
        text = repr(self.value)
        return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def from_file(known: Mapping[str, Setting], path: Path, environment: Mapping[str, str]) -> dict[str, Given]:
    """What the file says, with every `${NAME}` replaced."""
    tables = {setting.table for setting in known.values() if setting.table is not None}
    found: dict[str, Given] = {}
    for table, key, value in _entries(_read_toml(path), tables, path):
        place = f"[{table}] {key}" if table else key
        setting = _setting_at(known, tables, table, key, path)
        given = _expand(Given(setting, value, place, path), environment)
        if key in found:
            raise given.error("is given twice, in its table and at the top level")
        found[key] = given
    return found


def from_environment(known: Mapping[str, Setting], environment: Mapping[str, str]) -> dict[str, Given]:
    """What the TIDELOG_* variables say."""
    by_variable = {setting.variable: setting for setting in known.values()}
    found: dict[str, Given] = {}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES:
            continue
        setting = by_variable.get(variable)
        if setting is not None and environment[variable]:
            found[setting.name] = Given(setting, environment[variable], variable, is_text=True)
        if setting is None and not _SERVICE_LINK.fullmatch(variable):
            hint = _nearest(variable, by_variable.keys() | _OTHER_VARIABLES)
            raise ConfigError(f"the environment variable {variable} is not a setting", hint=hint)
    return found


def from_keywords(
    known: Mapping[str, Setting], overrides: Mapping[str, object], elsewhere: Mapping[str, str]
) -> dict[str, Given]:
    """What the caller says. `elsewhere` has the settings that others take, with where to give them."""
    found: dict[str, Given] = {}
    for name, value in overrides.items():
        if name not in known:
            hint = elsewhere.get(name) or _nearest(name, known)
            raise ConfigError(f"the keyword {name} is not a setting{' here' * (name in elsewhere)}", hint=hint)
        if value is not None:
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            found[name] = Given(known[name], plain, f"the keyword {name}")
    return found


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no settings file {path}", path=path) from None
    except OSError as error:
        raise ConfigError(f"the settings file cannot be read: {error.strerror}", path=path) from error
    except UnicodeDecodeError:
        raise ConfigError("the settings file is not UTF-8", path=path) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the settings file is not TOML: {error}", path=path) from None


def _entries(
    document: Mapping[str, object], tables: Collection[str], path: Path
) -> Iterator[tuple[str | None, str, object]]:
    """(table, key, value) of everything in the file."""
    for key, value in document.items():
        if not isinstance(value, dict):
            if key in tables:
                raise ConfigError(f"{key} must be a table", path=path, hint=f"Write [{key}] and its settings below it")
            yield None, key, value
            continue
        if key not in tables:
            raise ConfigError(f"[{key}] is not a table of settings", path=path, hint=_nearest(key, tables))
        for name, entry in value.items():
            yield key, name, entry


def _setting_at(
    known: Mapping[str, Setting], tables: Collection[str], table: str | None, key: str, path: Path
) -> Setting:
    setting = known.get(key)
    place = f"[{table}] {key}" if table else key
    if setting is None:
        candidates = known if table else {*known, *tables}
        raise ConfigError(f"{place} is not a setting", path=path, hint=_nearest(key, candidates))
    if table is not None and setting.table != table:
        home = f"below [{setting.table}]" if setting.table else "at the top of the file"
        raise ConfigError(f"{place} is in the wrong table", path=path, hint=f"Put {key} {home}")
    return setting


def _expand(given: Given, environment: Mapping[str, str]) -> Given:
    """Replaces every `${NAME}`; `$${` stands for a `${` that is meant."""
    if not isinstance(given.value, str) or "${" not in given.value:
        return given
    names = [match[1] for match in _REFERENCE.finditer(given.value) if not _is_escaped(match)]
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise given.error("has a ${...} without the name of a variable in it", "Write $${ for a ${ that is meant")
        if name not in environment:
            raise given.error(f"needs the environment variable {name}, which is not set")
    value = _REFERENCE.sub(lambda match: match[0][1:] if _is_escaped(match) else environment[match[1]], given.value)
    return given._replace(value=value, is_text=bool(names), is_hidden=bool(names))


def _is_escaped(match: re.Match[str]) -> bool:
    return match[0].startswith("$$")


def _nearest(name: str, candidates: Collection[str]) -> str | None:
    matches = difflib.get_close_matches(name, sorted(candidates), n=1)
    return f"Did you mean {matches[0]}?" if matches else None

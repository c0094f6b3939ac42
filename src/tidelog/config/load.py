"""The settings tables, the catalogue of settings derived from them, and the sources that they come from.

A new table is one field of `Settings`; its names, its variables and the values they accept follow from the struct's
types. Every setting has a default. A TOML file, the environment and keywords are merged into one `Settings`; the later
source wins, setting by setting.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from tidelog.cold.lease import DEFAULT_LEASE_SECONDS
from tidelog.cold.settings import TierOptions, TierSettings
from tidelog.config.serve import ServeSettings
from tidelog.engine.settings import EngineOptions, EngineSettings
from tidelog.errors import ConfigError, Hint
from tidelog.events import VARIABLE as LOG_VARIABLE
from tidelog.fields import Field, aliases_of, fields_of, nearest
from tidelog.log.settings import LogOptions, LogSettings
from tidelog.secret import HIDDEN, Secret
from tidelog.store.settings import MetadataOptions, MetadataSettings, StoreOptions, StoreSettings


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set. A field that is a struct is a table of the file; others are at its top level."""

    dir: str | None = None
    """The log directory. A relative one starts at the working directory."""

    store: str | None = None
    """Where history goes: s3://bucket/prefix, gs://, az://, file:///path or memory://. Default: what the directory
    remembers, else nowhere."""

    metadata: str | None = None
    """Where the catalog is: sqlite (in the log directory), sqlite:///path, etcd://host:port (several with commas,
    etcds:// with TLS) or bucket. Default: what the directory remembers, else sqlite."""

    metadata_root: str | None = None
    """Keeps several installations in one metadata store apart. Default: what the directory remembers, else tidelog."""

    lease_seconds: Annotated[float, msgspec.Meta(ge=1)] = DEFAULT_LEASE_SECONDS
    """How long after its last heartbeat an open log directory or engine with a store is taken for alive. Until then no
    other node opens its topics for writing, unless that is meant (`take_over=True`). Shorter lets others go on sooner
    after a crash; each third of it costs one small write to the metadata store."""

    log: LogSettings = msgspec.field(default_factory=LogSettings)
    """How the logs write, sync, rotate and remember."""

    tier: TierSettings = msgspec.field(default_factory=TierSettings)
    """How topics are shipped and how long they are kept."""

    object_store: StoreSettings = msgspec.field(default_factory=StoreSettings)
    """How the object store is reached."""

    metadata_store: MetadataSettings = msgspec.field(default_factory=MetadataSettings)
    """How the metadata store is reached."""

    hidden: frozenset[tuple[str | None, str]] = frozenset()
    """Not a setting: the keys of those whose values came from the environment by `${NAME}`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Overridden because a terminal's pretty printer would go around the repr."""
        return list(describe(self).items())


class EngineConfig(Settings, frozen=True, kw_only=True):
    """What can be set where engines are opened. One file may have both; what topics and engines have in common has one
    name, and the variables of an engine say that they are: `TIDELOG_ENGINE_ROTATE_MAX_BYTES`."""

    storage_engine: EngineSettings = msgspec.field(default_factory=EngineSettings)
    """How an engine writes, remembers, ships and forgets."""


class ServeConfig(EngineConfig, frozen=True, kw_only=True):
    """What can be set where a directory is served: everything that a file may have."""

    serve: ServeSettings = msgspec.field(default_factory=ServeSettings)
    """How the server is protected."""


_ENGINE_TABLE = "storage_engine"
_ENGINE_PREFIX = "TIDELOG_ENGINE_"
_VARIABLE_PREFIXES = {_ENGINE_TABLE: _ENGINE_PREFIX}


class Setting(NamedTuple):
    """One name under which something can be set: the setting's own, or an alias."""

    field: Field
    table: str | None
    given_as: str

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def key(self) -> tuple[str | None, str]:
        """Which setting it is, by whatever name."""
        return self.table, self.name

    @property
    def alias(self) -> str | None:
        """The alias that this is; None for the setting's own name."""
        return None if self.given_as == self.name else self.given_as

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return _VARIABLE_PREFIXES.get(self.table or "", "TIDELOG_") + self.given_as.upper()

    def value_in(self, settings: Settings) -> Any:
        return getattr(settings if self.table is None else getattr(settings, self.table), self.name)

    def shown_in(self, settings: Settings) -> object:
        """Its value there, or `***` instead of a secret one."""
        value = self.value_in(settings)
        if isinstance(value, dict) and self.key not in settings.hidden:
            return {name: _shown_entry(entry) for name, entry in value.items()}
        return HIDDEN if self.key in settings.hidden or isinstance(value, Secret) else value


def _shown_entry(entry: object) -> object:
    """An entry of a table of tables: what was given, without secrets."""
    if not isinstance(entry, msgspec.Struct):
        return entry
    given = {name: value for name, value in msgspec.structs.asdict(entry).items() if value is not None}
    return {name: HIDDEN if isinstance(value, Secret) else value for name, value in given.items()}


def describe(settings: Settings) -> dict[str, object]:
    """Every setting by its name with its value, or `***` instead of a secret one. An engine's whose name topics have
    too is `storage_engine.<name>`."""
    shown: dict[str, object] = {}
    for setting in catalogue(type(settings)):
        if setting.alias is None:
            name = f"{setting.table}.{setting.name}" if setting.name in shown else setting.name
            shown[name] = setting.shown_in(settings)
    return shown


@cache
def catalogue(settings_type: type[Settings]) -> tuple[Setting, ...]:
    """All settings under all their names, in the order in which they are documented."""
    found: dict[str, Setting] = {}
    owners: list[tuple[str | None, type[msgspec.Struct]]] = [(None, settings_type), *tables_of(settings_type).items()]
    for table, owner in owners:
        fields = fields_of(owner)
        names = {name: name for name in fields} | dict(aliases_of(owner))
        for given_as, name in names.items():
            if isinstance(fields[name].kind, inspect.StructType) or name == "hidden":
                continue
            setting = Setting(fields[name], table, given_as)
            assert setting.variable not in found, f"two settings are called {given_as}"
            found[setting.variable] = setting
    return tuple(found.values())


@cache
def settings_of(settings_type: type[Settings]) -> dict[str, Setting]:
    """All settings by each of their names. Where topics and engines share a name, an engine's settings have its own."""
    return {setting.given_as: setting for setting in catalogue(settings_type)}


@cache
def tables_of(settings_type: type[Settings]) -> dict[str, type[msgspec.Struct]]:
    """The tables by name."""
    fields = fields_of(settings_type).items()
    return {name: field.kind.cls for name, field in fields if isinstance(field.kind, inspect.StructType)}


# The three sources of settings: a TOML file, the environment, keywords.
#
# They resolve which setting is meant, and the location that an error points to; its field checks the value
# (`fields.py`). An empty variable counts as unset, and a keyword that is None as not given. A source that names a
# setting twice, by two of its names or in two places, is refused.


PREFIX = "TIDELOG_"
CONFIG_VARIABLE = "TIDELOG_CONFIG"
TOKEN_VARIABLE = "TIDELOG_TOKEN"
TLS_CA_VARIABLE = "TIDELOG_TLS_CA"
# Ours, but read elsewhere.
_OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, LOG_VARIABLE, TOKEN_VARIABLE, TLS_CA_VARIABLE})
# Kubernetes sets these in every pod next to a service that is called "tidelog"; nobody chose them.
_SERVICE_LINK = re.compile(r"TIDELOG_(SERVICE_(HOST|PORT)(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_REFERENCE = re.compile(r"\$?\$\{([^}]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHOWN_CHARACTERS = 60


class Given(NamedTuple):
    """A value as given, and how to name its location in an error."""

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
        """Points at the location."""
        return ConfigError(f"{self.place} {problem}", path=self.path, hint=hint)

    def convert(self) -> object:
        """The typed value; ConfigError names the location, the value and what is expected."""
        try:
            return self.setting.field.read(self.value, is_text=self.is_text)
        except ValueError as error:
            problem = str(error)
        # Outside the except block, so that nothing which knows the value hangs on to the error.
        raise self.error(f"{problem}, not {self.shown}")

    @property
    def shown(self) -> str:
        """The value for an error, if it may be seen."""
        if self.is_hidden or self.setting.field.is_secret or self.setting.field.is_table:
            return HIDDEN
        text = repr(self.value)
        return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


Found = dict[tuple[str | None, str], Given]


def _add(found: Found, given: Given) -> None:
    """One source names a setting once, by one name."""
    before = found.setdefault(given.setting.key, given)
    if before is not given:
        raise given.error(f"is given twice: it is the same setting as {before.place}", "Give one of them")


def from_file(known: Sequence[Setting], path: Path, environment: Mapping[str, str]) -> Found:
    """What the file says, with every `${NAME}` replaced."""
    by_table: dict[str | None, dict[str, Setting]] = {None: {}}
    for setting in known:
        by_table[None].setdefault(setting.given_as, setting)  # a name that topics and engines share is a topic's there
        by_table.setdefault(setting.table, {})[setting.given_as] = setting
    found: Found = {}
    for table, key, value in _entries(_read_toml(path), [name for name in by_table if name], path):
        place = f"[{table}] {key}" if table else key
        if table == _ENGINE_TABLE and _is_constant(key, value, place, path):
            continue
        setting = _setting_at(by_table, table, key, path)
        _add(found, _expand(Given(setting, value, place, path), environment))
    return found


def from_environment(known: Sequence[Setting], environment: Mapping[str, str]) -> Found:
    """What the TIDELOG_* variables say."""
    by_variable = {setting.variable: setting for setting in known}
    found: Found = {}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if variable.startswith(_ENGINE_PREFIX) and _is_constant(
            variable.removeprefix(_ENGINE_PREFIX).lower(), environment[variable], variable
        ):
            continue
        setting = by_variable.get(variable)
        if setting is not None and environment[variable]:
            _add(found, Given(setting, environment[variable], variable, is_text=True))
        if setting is None and not _SERVICE_LINK.fullmatch(variable):
            hint = nearest(variable, by_variable.keys() | _OTHER_VARIABLES)
            raise ConfigError(f"the environment variable {variable} is not a setting", hint=hint)
    return found


def from_keywords(known: Mapping[str, Setting], overrides: Mapping[str, object], elsewhere: Mapping[str, str]) -> Found:
    """What the caller says. `elsewhere` has the settings that others take, with where to give them."""
    found: Found = {}
    for name, value in overrides.items():
        if name not in known:
            hint = elsewhere.get(name) or nearest(name, known)
            raise ConfigError(f"the keyword {name} is not a setting{' here' * (name in elsewhere)}", hint=hint)
        if value is not None:
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            _add(found, Given(known[name], plain, f"the keyword {name}"))
    return found


def _is_constant(name: str, value: object, place: str, path: Path | None = None) -> bool:
    """Whether a name of the original design is meant that has one meaning only: it is accepted, and sets nothing."""
    accepted = EngineSettings.CONSTANTS.get(name)
    if accepted is not None and value is not None and str(value) not in accepted:
        raise ConfigError(f"{place} must be one of {', '.join(accepted)}, not {value!r}", path=path)
    return accepted is not None


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
            raise ConfigError(f"[{key}] is not a table of settings", path=path, hint=nearest(key, tables))
        for name, entry in value.items():
            yield key, name, entry


def _setting_at(
    by_table: Mapping[str | None, Mapping[str, Setting]], table: str | None, key: str, path: Path
) -> Setting:
    setting = by_table[table].get(key)
    if setting is not None:
        return setting
    place = f"[{table}] {key}" if table else key
    elsewhere = by_table[None].get(key)
    if elsewhere is not None:
        home = f"below [{elsewhere.table}]" if elsewhere.table else "at the top of the file"
        raise ConfigError(f"{place} is in the wrong table", path=path, hint=f"Put {key} {home}")
    candidates = by_table[None] if table else {*by_table[None], *filter(None, by_table)}
    raise ConfigError(f"{place} is not a setting", path=path, hint=nearest(key, candidates))


def _expand(given: Given, environment: Mapping[str, str]) -> Given:
    """Replaces every `${NAME}`; `$${` stands for a `${` that is meant."""
    if isinstance(given.value, dict):
        parts = {key: _expand(given._replace(value=one), environment) for key, one in given.value.items()}
        is_hidden = any(part.is_hidden for part in parts.values())
        return given._replace(value={key: part.value for key, part in parts.items()}, is_hidden=is_hidden)
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


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SERVE_TABLE = "serve"
_FOR_THE_SERVER = "It is for `tidelog serve`"
_SHARED_WITH_ENGINES = ("dir", "store", "lease_seconds", "ownership_check_seconds")
SettingsType = TypeVar("SettingsType", bound=Settings)


def load_settings(
    config: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings of this process; ConfigError names the location, the value and what was expected.

    `config` defaults to TIDELOG_CONFIG, `environment` to that of the process.
    """
    known = settings_of(Settings)
    elsewhere = dict.fromkeys(settings_of(EngineConfig).keys() - known, "It is for an engine: tidelog.open_engine")
    elsewhere |= dict.fromkeys(fields_of(ServeSettings), _FOR_THE_SERVER)
    given = _given(ServeConfig, config, environment) | from_keywords(known, overrides or {}, elsewhere)
    _build(ServeConfig, given)  # whatever is in a file is checked, whatever is opened first
    return _build(Settings, _only(Settings, given))


def load_engine_config(
    config: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> EngineConfig:
    """As `load_settings`, for opening an engine. Keywords are an engine's and those of its store."""
    known = settings_of(EngineConfig)
    accepted = {name: setting for name, setting in known.items() if _is_for_engines(setting)}
    elsewhere = dict.fromkeys(known.keys() - accepted, "It is for topics: tidelog.open")
    elsewhere |= dict.fromkeys(fields_of(ServeSettings), _FOR_THE_SERVER)
    chosen = {
        name: value for name, value in (overrides or {}).items() if not _is_constant(name, value, f"the keyword {name}")
    }
    given = _given(ServeConfig, config, environment) | from_keywords(accepted, chosen, elsewhere)
    _build(ServeConfig, given)
    return _build(EngineConfig, _only(EngineConfig, given))


def load_serve_settings(
    config: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, object],
) -> ServeSettings:
    """As `load_settings`, of the server. Options that are None are not given."""
    known = {name: setting for name, setting in settings_of(ServeConfig).items() if setting.table == _SERVE_TABLE}
    given = _given(ServeConfig, config, environment) | from_keywords(known, overrides, {})
    return _build(ServeConfig, given).serve


class InForce(NamedTuple):
    """A setting, its value (hidden if it must not be seen), where that comes from, and the alias it was given by."""

    name: str
    table: str | None
    value: object
    source: str
    alias: str | None


def explain_settings(
    config: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, object],
) -> list[InForce]:
    """Every setting that is in force here, of topics, engines and the server, in the order of the documents."""
    given = _given(ServeConfig, config, environment)
    sources = {key: one.place if one.path is None else str(one.path) for key, one in given.items()}
    overriding = from_keywords({**settings_of(ServeConfig), **settings_of(Settings)}, overrides, {})
    sources |= dict.fromkeys(overriding, "command line")
    given |= overriding
    settings = _build(ServeConfig, given)
    return [
        InForce(
            setting.name,
            setting.table,
            setting.shown_in(settings),
            sources.get(setting.key, "default"),
            given[setting.key].setting.alias if setting.key in given else None,
        )
        for setting in catalogue(ServeConfig)
        if setting.alias is None
    ]


def _is_for_engines(setting: Setting) -> bool:
    return setting.table in ("storage_engine", "object_store", "metadata_store") or setting.name in _SHARED_WITH_ENGINES


def load_as(
    settings_type: type[SettingsType],
    config: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, object],
) -> SettingsType:
    """`load_settings` for a subclass with more tables."""
    given = _given(settings_type, config, environment)
    return _build(settings_type, given | from_keywords(settings_of(settings_type), overrides, {}))


def _given(
    settings_type: type[Settings], config: str | os.PathLike[str] | None, environment: Mapping[str, str] | None
) -> Found:
    """What the file and the environment say."""
    known = catalogue(settings_type)
    environment = os.environ if environment is None else environment
    config = config or environment.get(CONFIG_VARIABLE)
    given = from_file(known, Path(config), environment) if config else {}
    return given | from_environment(known, environment)


def _only(settings_type: type[Settings], given: Found) -> Found:
    """Without the tables that these settings do not have."""
    tables = (None, *tables_of(settings_type))
    return {key: one for key, one in given.items() if key[0] in tables}


def _build(settings_type: type[SettingsType], given: Found) -> SettingsType:
    values: dict[str | None, dict[str, Any]] = {table: {} for table in (None, *tables_of(settings_type))}
    for (table, name), one in given.items():
        values[table][name] = one.convert()
    tables: dict[str, Any] = {table: struct(**values[table]) for table, struct in tables_of(settings_type).items()}
    hidden = frozenset(key for key, one in given.items() if one.is_hidden)
    return settings_type(**values[None], **tables, hidden=hidden)


def checked_directory(path: object) -> str:
    """The name of a directory as text. An empty one is refused: it usually comes from an unset variable."""
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str):
        raise ConfigError(f"a directory is named by a str or a Path, not by {type(path).__name__}")
    if not text:
        raise ConfigError("the name of the directory is empty", hint='The working directory is "."')
    if "\0" in text:
        raise ConfigError(f"the name of the directory has a NUL in it: {text!r}")
    if _URL.match(text):
        raise ConfigError(
            f"dir must be a directory on this machine, not the URL {text}",
            hint=Hint(
                'A store is named beside it, with store="s3://bucket/prefix"; a log in memory is tidelog.open(None)',
                command="A store is named beside it, with --store s3://bucket/prefix",
            ),
        )
    return text


def directory_of(settings: Settings, example: str) -> Path:
    """The directory that the settings name. It is absolute: a process may change its own while this one is open."""
    if not settings.dir:
        raise ConfigError("no directory was named", hint=f"Give it: {example}, `dir` in the config, or TIDELOG_DIR")
    return Path(os.path.abspath(checked_directory(settings.dir)))


# The settings as keywords, so that editors show them: `tidelog.open(rotate_max_bytes="64MiB")`.
#
# A test compares them with the settings themselves, which alone document each setting.


class OpenOptions(LogOptions, TierOptions, StoreOptions, MetadataOptions, total=False):
    """What `tidelog.open` takes besides its named arguments."""

    metadata_root: str | None
    lease_seconds: float | str


class OpenEngineOptions(EngineOptions, StoreOptions, MetadataOptions, total=False):
    """What `tidelog.open_engine` and `tidelog.restore_engine` take besides their named arguments."""

    lease_seconds: float | str
    ownership_check_seconds: float | str

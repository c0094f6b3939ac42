"""The settings tables, and the catalogue of settings derived from them.

A new table is one field of `Settings`; its names, its variables and the values they accept follow from the struct's
types. Every setting has a default.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import inspect

from tidelog.cold.lease import DEFAULT_LEASE_SECONDS
from tidelog.cold.settings import TierSettings
from tidelog.engine.settings import EngineSettings
from tidelog.fields import Field, aliases_of, fields_of
from tidelog.log.settings import LogSettings
from tidelog.secret import HIDDEN, Secret
from tidelog.store.settings import MetadataSettings, StoreSettings


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


_VARIABLE_PREFIXES = {"storage_engine": "TIDELOG_ENGINE_"}


class Setting(NamedTuple):
    """One name under which something can be set: the setting's own, or an alias."""

    field: Field
    table: str | None
    given_as: str

    @property
    def name(self) -> str:
        """The setting's own name."""
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
        """Its value there."""
        return getattr(settings if self.table is None else getattr(settings, self.table), self.name)

    def shown_in(self, settings: Settings) -> object:
        """Its value there, or `***` instead of a secret one."""
        value = self.value_in(settings)
        return HIDDEN if self.key in settings.hidden or isinstance(value, Secret) else value


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

"""What can be set: the tables, and the catalogue of settings that is read off them.

A new table is one field of `Settings`; its names, its variables and what they accept follow from the struct's types.
Every setting has a default.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import inspect

from tidelog.engine.settings import EngineSettings
from tidelog.log.settings import LogSettings
from tidelog.secret import HIDDEN, Secret
from tidelog.tier.keys import DEFAULT_ROOT
from tidelog.tier.node_lease import DEFAULT_LEASE_SECONDS
from tidelog.tier.store_settings import StoreSettings
from tidelog.tier.tier_settings import TierSettings


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set. A field that is a struct is a table of the file; others are at its top level."""

    dir: str | None = None
    """The log directory. A relative one starts at the working directory."""

    store: str | None = None
    """Where history goes: s3://bucket/prefix, gs://, az://, file:///path or memory://. Default: what the directory
    remembers, else nowhere."""

    metadata: str | None = None
    """Where the catalog is: sqlite (in the log directory), sqlite:///path, etcd://host:port or bucket. Default: what
    the directory remembers, else sqlite."""

    metadata_root: str = DEFAULT_ROOT
    """Keeps several installations in one metadata store apart."""

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

    hidden_names: frozenset[str] = frozenset()
    """Not a setting: the names of those whose values came out of the environment by `${NAME}`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Overridden because a terminal's pretty printer would go around the repr."""
        return list(describe(self).items())


class EngineConfig(Settings, frozen=True, kw_only=True):
    """What can be set where engines are opened: one file may have both, and the variables of an engine say that they
    are: `TIDELOG_ENGINE_WAL_SEGMENT_SIZE`."""

    storage_engine: EngineSettings = msgspec.field(default_factory=EngineSettings)
    """How an engine writes, remembers, ships and forgets."""


_VARIABLE_PREFIXES = {"storage_engine": "TIDELOG_ENGINE_"}


class Setting(NamedTuple):
    """One setting of the catalogue. `kind` is its type as msgspec sees it, without the `| None`."""

    name: str
    table: str | None
    type: Any
    kind: inspect.Type

    @property
    def is_secret(self) -> bool:
        return isinstance(self.kind, inspect.CustomType) and self.kind.cls is Secret

    @property
    def is_number(self) -> bool:
        return isinstance(self.kind, inspect.IntType | inspect.FloatType)

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return _VARIABLE_PREFIXES.get(self.table or "", "TIDELOG_") + self.name.upper()

    def value_in(self, settings: Settings) -> Any:
        """Its value there."""
        return getattr(settings if self.table is None else getattr(settings, self.table), self.name)


def describe(settings: Settings) -> dict[str, object]:
    """Every setting by its name with its value, or `***` in the place of one that must not be seen."""
    shown: dict[str, object] = {}
    for name, setting in settings_of(type(settings)).items():
        value = setting.value_in(settings)
        is_hidden = name in settings.hidden_names or isinstance(value, Secret)
        shown[name] = HIDDEN if is_hidden else value
    return shown


@cache
def settings_of(settings_type: type[Settings]) -> dict[str, Setting]:
    """The catalogue: all settings by name."""
    found: dict[str, Setting] = {}
    owners: list[tuple[str | None, type[msgspec.Struct]]] = [(None, settings_type), *tables_of(settings_type).items()]
    for table, owner in owners:
        types = {field.name: field.type for field in msgspec.structs.fields(owner)}
        for field in _fields_of(owner):
            if isinstance(field.type, inspect.StructType) or field.name == "hidden_names":
                continue
            assert field.name not in found, f"two settings are called {field.name}"
            found[field.name] = Setting(field.name, table, types[field.name], _without_none(field.type))
    return found


@cache
def tables_of(settings_type: type[Settings]) -> dict[str, type[msgspec.Struct]]:
    """The tables by name."""
    return {f.name: f.type.cls for f in _fields_of(settings_type) if isinstance(f.type, inspect.StructType)}


def _fields_of(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _without_none(kind: inspect.Type) -> inspect.Type:
    """`int | None` accepts what `int` accepts: no file or variable can say None."""
    if not isinstance(kind, inspect.UnionType):
        return kind
    others = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    return others[0] if len(others) == 1 else kind

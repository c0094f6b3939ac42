"""Addresses of topics and engines: one parser for Spark's options, the jobs and the command line.

    /data/logs                 a directory: its store, metadata and name are the ones recorded in it
    s3://bucket/prefix         a store; the catalogs are in the bucket itself, or have a copy there, unless `metadata`
                               names another location. An engine in it has a name, `main` unless another is given

Invariants
- An address is plain data: it can be pickled, compared and sent to a worker. It holds nothing open. Workers get its
  `place`, which leads to the stores alone.
- Opening through an address claims nothing and disturbs no owner.
- The settings of the driver's environment (`TIDELOG_*`) travel with it; cloud credentials (`AWS_*` and the like) do
  not: a task finds those where it runs. What the environment says about other places is not meant for it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from tidelog.cold.catalog import Catalog
from tidelog.config import EngineConfig, Settings, load_engine_config, load_settings
from tidelog.config.load import settings_of
from tidelog.engine.cold.manifest import Manifest, read_manifest
from tidelog.engine.directory import ENGINE_FILE, remembered
from tidelog.errors import ConfigError, Hint, NotFoundError, NotSupportedError
from tidelog.fields import nearest
from tidelog.files import LocalFiles
from tidelog.pipeline.location import EngineLocation, TopicLocation
from tidelog.store.keys import DEFAULT_ENGINE, DEFAULT_ROOT, EngineKeys, check_part
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.open import BUCKET, open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import canonical_url, is_store_directory, open_store, require_store_directory
from tidelog.topics.directory import LogDirectory
from tidelog.topics.directory_info import INSIDE, Place, look_at, metadata_url, read_info
from tidelog.wiring import open_directory, refuse_store_settings

__all__ = ["Address", "EngineLocation", "EngineRoot", "OpenedEngine", "Root", "find_engine", "find_root"]

_NO_DIRECTORY = Path("/nonexistent/tidelog")
_CONFIG = "config"
_SCHEMES = ("s3:", "gs:", "az:", "file:")
_PLACES = ("dir", "store", "metadata")


class Address(msgspec.Struct, frozen=True):
    """A directory or a store URL, with the settings that it is reached with, by name and as text."""

    location: str
    settings: dict[str, str] = msgspec.field(default_factory=dict)

    kind: ClassVar[type[Settings]] = Settings

    def __repr__(self) -> str:
        """Settings may be secrets."""
        return f"{type(self).__name__}({self.location!r}, settings of {sorted(self.settings)})"

    @property
    def is_store(self) -> bool:
        """Whether it is a store alone, without a directory."""
        return "://" in self.location

    @property
    def directory(self) -> Path | None:
        return None if self.is_store else Path(self.location)

    @property
    def _variables(self) -> dict[str, str]:
        return {_variable(self.kind, name): value for name, value in self.settings.items()}


def _variable(kind: type[Settings], name: str) -> str:
    return "TIDELOG_CONFIG" if name == _CONFIG else settings_of(kind)[name].variable


def _parsed(location: str | os.PathLike[str], noun: str) -> str:
    """The place, in the one way to write it; ConfigError when it cannot be one."""
    text = os.fspath(location)
    if not text:
        raise ConfigError(f"no {noun} was named", hint="Name its directory, or its store, such as s3://bucket/prefix")
    if text.startswith("memory:"):
        raise ConfigError("memory:// is inside one process, and Spark reads in others", hint="Use file:///path, s3://")
    if "://" in text:
        return canonical_url(text)
    if text.startswith(_SCHEMES):
        hint = "A store has two slashes: s3://bucket/prefix"
        raise ConfigError(f"{text} is neither a directory nor a store", hint=hint)
    return os.path.abspath(os.path.expanduser(text))


def _settings(
    kind: type[Settings], given: Mapping[str, object], elsewhere: Collection[str], refused: Collection[str] = ()
) -> dict[str, str]:
    """Those that were given, and those of the environment, except for `elsewhere`: what the address says itself."""
    known = settings_of(kind)
    for name in given:
        if (name not in known or name in refused) and name != _CONFIG:
            what = f"{name} is not a setting" + (" of an engine or its store" if refused else "")
            raise ConfigError(what, hint=nearest(name, {*known} - {*refused}))
    names = [name for name in (*known, _CONFIG) if name not in elsewhere]
    found = {name: os.environ.get(_variable(kind, name)) for name in names}
    environment = {name: value for name, value in found.items() if value is not None}
    return {**environment, **{name: str(value) for name, value in given.items()}}


class Root(Address, frozen=True):
    """The address of topics. `settings` are those of `tidelog.open`."""

    metadata: str | None = None

    def load(self, **overrides: object) -> Settings:
        """The settings for opening it, with the place in them."""
        place = {"store": self.location if self.is_store else None, "metadata": self.metadata}
        return load_settings(None, self._variables, {**place, **overrides})

    def open(self) -> LogDirectory:
        """Opens it for reading only. Close it, or use it in a `with` statement."""
        require_store_directory(self.location)
        # What the checkpoint of a live owner vouches for is not read here: readers of messages check every frame.
        settings = self.load(open_check_bytes=0)
        return open_directory(self.directory or _NO_DIRECTORY, settings, read_only=True)

    @property
    def is_there(self) -> bool:
        """Whether it has been made: the first row that is written makes a directory, and a file:// store."""
        directory = self.directory
        if directory is None:
            return is_store_directory(self.location)
        return directory.is_dir() and read_info(LocalFiles(), directory) is not None

    def existing_place(self) -> TopicLocation | None:
        """The same as `place`, for reading: NotFoundError where a file:// store is not there."""
        require_store_directory(self.location)
        return self.place

    @property
    def place(self) -> TopicLocation | None:
        """Where objects and catalogs are, or will be, as the directory remembers it; None without a store."""
        settings, directory = self.load(), self.directory
        found, url = Place(self.location, self.metadata, settings.metadata_root), self.metadata
        if directory is not None:
            found = look_at(LocalFiles(), directory, Place(None, self.metadata, settings.metadata_root)).place
            url = None if found.metadata is None else metadata_url(directory, found.metadata)
        if found.store is None or url is None:
            refuse_store_settings(Path(self.location), settings)
            return None
        return TopicLocation(
            found.store,
            settings.object_store,
            url,
            found.metadata_root or DEFAULT_ROOT,
            settings.metadata_store,
            is_shared=found.metadata not in (INSIDE, BUCKET),
        )


def find_root(location: str | os.PathLike[str], metadata: str | None = None, **settings: object) -> Root:
    """The root at a place, with what the environment says about it; ConfigError when it cannot be one."""
    text = _parsed(location, "root")
    is_store = "://" in text
    given = _settings(Settings, settings, _PLACES if is_store else (*_PLACES, "metadata_root"))
    return Root(text, given, metadata or (BUCKET if is_store else None))


class EngineRoot(Address, frozen=True):
    """The address of an engine, and its store. `settings` are those of `tidelog.open_engine`."""

    store_url: str = ""
    name: str = DEFAULT_ENGINE

    kind: ClassVar[type[Settings]] = EngineConfig

    @property
    def subject(self) -> str:
        """What a text calls it."""
        return f"engine {self.name} in {self.store_url}"

    @property
    def keys(self) -> EngineKeys:
        """All names of the engine in its store."""
        return EngineKeys(self.name)

    @property
    def place(self) -> EngineLocation:
        """What a worker needs to reach it."""
        return EngineLocation(self.store_url, self.load().object_store, self.name)

    def load(self) -> EngineConfig:
        """The settings that it is reached with."""
        return load_engine_config(None, self._variables, {})

    def at(self, url: str) -> EngineRoot:
        """The same engine in another store: a replica."""
        return msgspec.structs.replace(self, location=url, store_url=url)

    @contextmanager
    def open(self, *, read_only: bool = True) -> Iterator[OpenedEngine]:
        """Opens its store in its current state; NotFoundError if no engine has shipped anything.

        Without `read_only` the metadata is writable, for jobs that publish something beside the engine's owner.
        """
        require_store_directory(self.store_url)
        objects = open_store(self.store_url, self.load().object_store)
        with open_metadata_store(BUCKET, objects, read_only=read_only) as metadata:
            found = read_manifest(metadata, self.keys)
            if found is None:
                raise NotFoundError(
                    f"there is no engine called {self.name} in {self.store_url}, or it has shipped nothing yet",
                    operation="open engine",
                    hint="Check the URL and the name; an engine ships what is at or below its low-water mark",
                )
            yield OpenedEngine(objects, metadata, Catalog(metadata, self.keys), self.keys, found[0])


@dataclass(frozen=True)
class OpenedEngine:
    """An engine's store, open, with its manifest as it was when it was opened."""

    objects: ObjectStore
    metadata: MetadataStore
    catalog: Catalog
    keys: EngineKeys
    manifest: Manifest

    def newest_manifest(self) -> Manifest:
        found = read_manifest(self.metadata, self.keys)
        return self.manifest if found is None else found[0]


def find_engine(location: str | os.PathLike[str], name: str | None = None, **settings: object) -> EngineRoot:
    """The engine at a place, with what the environment says about it; an error that names the fix when there is none.

    `name` is the engine's name in its store; a directory knows its own. `settings` are those of `tidelog.open_engine`,
    and `config` may name their file.
    """
    text = _parsed(location, "engine")
    if name is not None:
        check_part(name)
    places = (*_PLACES, "metadata_root")
    address = EngineRoot(text, _settings(EngineConfig, settings, places, places), text, name or DEFAULT_ENGINE)
    if address.directory is None:
        return address
    known = remembered(LocalFiles(), address.directory)
    if known is None:
        missing = f"it has no {ENGINE_FILE}" if address.directory.is_dir() else "there is no such directory"
        raise NotFoundError(
            f"there is no engine in {text}: {missing}",
            hint="Name the directory of an engine, or its store, such as s3://bucket/prefix",
        )
    if name not in (None, known.name):
        raise ConfigError(f"the engine in {text} is called {known.name}, not {name}", hint="Leave its name out")
    store = known.store or address.load().storage_engine.store_url
    if store is None:
        raise NotSupportedError(
            f"the engine in {text} has no store: it is on that disk alone, where Spark's workers cannot read it",
            hint=Hint(
                'Open it with one, as in tidelog.open_engine(DIR, store="s3://bucket/prefix"), and ship()',
                command=f"Run `tidelog engine ship --dir {text} --store s3://bucket/prefix`",
            ),
        )
    return msgspec.structs.replace(address, store_url=_parsed(store, "engine"), name=known.name)

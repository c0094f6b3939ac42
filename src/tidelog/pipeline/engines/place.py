"""Where an engine is: the address that the driver resolves once, and what it opens there.

    ./engine                   an engine's directory: its store and its name there are those that it remembers
    s3://bucket/prefix         a store; the engine in it has a name, `main` unless another is given

Invariants
- A root is plain data: it can be pickled, compared and sent to a worker. Nothing is open in it. Workers get its
  `place`, which leads to the store alone.
- The engine itself is never opened: whoever owns it goes on undisturbed, and nothing of it is claimed.
- The settings of the driver's environment (`TIDELOG_*`) travel with it; keys of a cloud (`AWS_*` and the like) do not:
  a task finds those where it runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tidelog.config import EngineConfig, load_engine_config
from tidelog.config.settings import settings_of
from tidelog.engine.engine_directory import ENGINE_FILE, remembered
from tidelog.engine.manifest import Manifest, read_manifest
from tidelog.errors import ConfigError, NotFoundError, NotSupportedError
from tidelog.files import LocalFiles
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import DEFAULT_ENGINE, EngineKeys, check_part
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.stores import canonical_url, open_store

__all__ = ["EnginePlace", "EngineRoot", "OpenedEngine", "find_engine"]

_CONFIG = "config"
_CONFIG_VARIABLE = "TIDELOG_CONFIG"
# Where the engine is says its location; what the environment says about other places is not meant for it.
_PLACES = ("dir", "store", "metadata", "metadata_root")
_SCHEMES = ("s3:", "gs:", "az:", "file:")


class EngineRoot(msgspec.Struct, frozen=True):
    """An engine, by its directory or its store. `settings` are those of `tidelog.open_engine`, by name and as text."""

    location: str
    store_url: str
    name: str = DEFAULT_ENGINE
    settings: dict[str, str] = {}

    def __repr__(self) -> str:
        """Settings may be secrets."""
        return f"EngineRoot({self.location!r}, {self.name!r}, settings of {sorted(self.settings)})"

    @property
    def directory(self) -> Path | None:
        """The engine's directory; None for one that is known by its store alone."""
        return None if "://" in self.location else Path(self.location)

    @property
    def keys(self) -> EngineKeys:
        """All names of the engine in its store."""
        return EngineKeys(self.name)

    @property
    def place(self) -> EnginePlace:
        """What a worker needs to reach it."""
        return EnginePlace(self.store_url, self.load().object_store, self.name)

    def load(self) -> EngineConfig:
        """The settings that it is reached with."""
        return _loaded(self.settings)

    @contextmanager
    def open(self, *, read_only: bool = True) -> Iterator[OpenedEngine]:
        """Its store with what that says now; NotFoundError where no engine has shipped anything.

        Without `read_only` the metadata takes writes, for whoever publishes something beside the engine's owner.
        """
        _require_store_directory(self.store_url)
        objects = open_store(self.store_url, self.load().object_store)
        with open_metadata_store(BUCKET, objects, read_only=read_only) as metadata:
            manifest = _manifest(metadata, self)
            yield OpenedEngine(objects, metadata, Catalog(metadata, self.keys), self.keys, manifest)


@dataclass(frozen=True)
class OpenedEngine:
    """An engine's store, open, with its manifest as it was when it was opened."""

    objects: ObjectStore
    metadata: MetadataStore
    catalog: Catalog
    keys: EngineKeys
    manifest: Manifest

    def newest_manifest(self) -> Manifest:
        """The manifest as it is published now."""
        found = read_manifest(self.metadata, self.keys)
        return self.manifest if found is None else found[0]


def find_engine(location: str | os.PathLike[str], name: str | None = None, **settings: object) -> EngineRoot:
    """The engine at a place, with what the environment says about it; an error that names the fix when there is none.

    `name` is the engine's name in its store; a directory knows its own. `settings` are those of `tidelog.open_engine`,
    and `config` may name their file.
    """
    text = os.fspath(location)
    _refuse_no_place(text)
    if name is not None:
        check_part(name)
    given = {**_from_environment(), **_checked(settings)}
    if "://" in text:
        return EngineRoot(canonical_url(text), canonical_url(text), name or DEFAULT_ENGINE, given)
    return _in_directory(Path(os.path.abspath(os.path.expanduser(text))), name, given)


def _in_directory(directory: Path, name: str | None, given: dict[str, str]) -> EngineRoot:
    known = remembered(LocalFiles(), directory)
    if known is None:
        raise NotFoundError(
            f"there is no engine in {directory}: {_what_is_missing(directory)}",
            hint="Name the directory of an engine, or its store, such as s3://bucket/prefix",
        )
    if name not in (None, known.name):
        raise ConfigError(f"the engine in {directory} is called {known.name}, not {name}", hint="Leave its name out")
    store = known.store or _loaded(given).storage_engine.store_url
    if store is None:
        raise NotSupportedError(
            f"the engine in {directory} has no store: it is on that disk alone, where Spark's workers cannot read it",
            hint='Open it with one, as in tidelog.open_engine(DIR, store="s3://bucket/prefix"), and ship()',
        )
    _refuse_no_place(store)
    return EngineRoot(str(directory), canonical_url(store), known.name, given)


def _what_is_missing(directory: Path) -> str:
    return f"it has no {ENGINE_FILE}" if directory.is_dir() else "there is no such directory"


def _refuse_no_place(text: str) -> None:
    if not text:
        raise ConfigError("no engine is named", hint="Name its directory, or its store, such as s3://bucket/prefix")
    if text.startswith("memory:"):
        raise ConfigError("memory:// is inside one process, and Spark reads in others", hint="Use file:///path, s3://")
    if "://" not in text and text.startswith(_SCHEMES):
        hint = "A store has two slashes: s3://bucket/prefix"
        raise ConfigError(f"{text} is neither a directory nor a store", hint=hint)


def _checked(settings: Mapping[str, object]) -> dict[str, str]:
    known = settings_of(EngineConfig)
    for name in settings:
        if (name not in known or name in _PLACES) and name != _CONFIG:
            raise ConfigError(f"{name} is not a setting of an engine or its store")
    return {name: str(value) for name, value in settings.items()}


def _from_environment() -> dict[str, str]:
    names = [name for name in [*settings_of(EngineConfig), _CONFIG] if name not in _PLACES]
    found = {name: os.environ.get(_variable(name)) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _variable(name: str) -> str:
    return _CONFIG_VARIABLE if name == _CONFIG else settings_of(EngineConfig)[name].variable


def _loaded(settings: Mapping[str, str]) -> EngineConfig:
    return load_engine_config(None, {_variable(name): value for name, value in settings.items()}, {})


def _manifest(metadata: MetadataStore, root: EngineRoot) -> Manifest:
    found = read_manifest(metadata, root.keys)
    if found is None:
        raise NotFoundError(
            f"there is no engine called {root.name} in {root.store_url}, or it has shipped nothing yet",
            operation="open engine",
            hint="Check the URL and the name; an engine ships what is at or below its low-water mark",
        )
    return found[0]


def _require_store_directory(url: str) -> None:
    """Whoever opens a file:// store makes its directory; a slip in its name would be an empty store then."""
    if not url.startswith("file://"):
        return
    path = Path(url.removeprefix("file://"))
    if not path.is_dir():
        raise NotFoundError("there is no such directory", path=path, operation="open store", hint="Check the path")

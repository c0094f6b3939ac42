"""Where topics are: the address that the driver resolves once and every task opens for itself.

    /data/logs                 a log directory: its store and metadata are those that it remembers
    s3://bucket/prefix         a store; its catalog is in the bucket itself unless `metadata` names another place

Invariants
- A root is plain data: it can be pickled, compared and sent to a worker. Nothing is open in it.
- What is opened through it changes nothing there.
- The settings of the driver's environment (`TIDELOG_*`) travel with it; keys of a cloud (`AWS_*` and the like) do not:
  a task finds those where it runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tidelog.config import Settings, load_settings
from tidelog.config.settings import settings_of
from tidelog.errors import ConfigError, NotFoundError
from tidelog.tier.stores import canonical_url
from tidelog.topics.storage import LogDirectory
from tidelog.wiring import open_directory

_NO_DIRECTORY = Path("/nonexistent/tidelog")
_VARIABLE_PREFIX = "TIDELOG_"
_BUCKET = "bucket"
_CONFIG = "config"
_SCHEMES = ("s3:", "gs:", "az:", "file:")


class Root(msgspec.Struct, frozen=True):
    """A log directory or a store URL. `settings` are those of `tidelog.open`, by name and as text."""

    location: str
    metadata: str | None = None
    settings: dict[str, str] = {}

    def __repr__(self) -> str:
        """Settings may be secrets."""
        return f"Root({self.location!r}, metadata={self.metadata!r}, settings of {sorted(self.settings)})"

    @property
    def is_store(self) -> bool:
        """Whether it is a store alone, without a directory."""
        return "://" in self.location

    @property
    def directory(self) -> Path | None:
        return None if self.is_store else Path(self.location)

    def load(self, **overrides: object) -> Settings:
        """The settings for opening it, with the place in them."""
        place = {"store": self.location if self.is_store else None, "metadata": self.metadata}
        variables = {_VARIABLE_PREFIX + name.upper(): value for name, value in self.settings.items()}
        return load_settings(None, variables, {**place, **overrides})

    def open(self) -> LogDirectory:
        """Opens it for reading only. Close it, or use it in a `with` statement."""
        self._require_store_directory()
        # What the checkpoint of a live owner vouches for is not read here: whoever reads messages checks every frame.
        settings = self.load(open_check_bytes=0)
        return open_directory(self.directory or _NO_DIRECTORY, settings, read_only=True)

    def _require_store_directory(self) -> None:
        """Whoever opens a file:// store makes its directory; a slip in its name would be an empty store then."""
        if not self.location.startswith("file:"):
            return
        path = Path(canonical_url(self.location).removeprefix("file://"))
        if not path.is_dir():
            raise NotFoundError("there is no such directory", path=path, operation="open store", hint="Check the path")


def find_root(location: str | os.PathLike[str], metadata: str | None = None, **settings: object) -> Root:
    """The root at a place, with what the environment says about it; ConfigError when it cannot be one."""
    text = os.fspath(location)
    if not text:
        raise ConfigError("root is empty", hint="Name a log directory, or a store such as s3://bucket/prefix")
    if text.startswith("memory:"):
        hint = "Use file:///path or a bucket"
        raise ConfigError("memory:// is inside one process, and Spark reads in others", hint=hint)
    if "://" not in text and text.startswith(_SCHEMES):
        raise ConfigError(
            f"{text} is neither a directory nor a store", hint="A store has two slashes: s3://bucket/prefix"
        )
    known = settings_of(Settings)
    for name in settings:
        if name not in known and name != _CONFIG:
            raise ConfigError(f"{name} is not a setting")
    given = {**_from_environment(known), **{name: str(value) for name, value in settings.items()}}
    if "://" not in text:
        return Root(os.path.abspath(os.path.expanduser(text)), metadata, given)
    return Root(text, metadata or _BUCKET, given)


def _from_environment(known: Mapping[str, object]) -> dict[str, str]:
    """The root says where; what the environment says about another place is not meant for it."""
    names = [name for name in [*known, _CONFIG] if name not in ("dir", "store", "metadata")]
    found = {name: os.environ.get(_VARIABLE_PREFIX + name.upper()) for name in names}
    return {name: value for name, value in found.items() if value is not None}

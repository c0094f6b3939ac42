"""Puts the parts together: settings in, open things out."""

from __future__ import annotations

import os
from pathlib import Path

from tidelog.config import load_settings
from tidelog.errors import ConfigError
from tidelog.topics.storage import LogDirectory


def open(
    dir: str | os.PathLike[str] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    read_only: bool = False,
    **settings: object,
) -> LogDirectory:
    """Opens a log directory, made when absent, and returns it; close it, or use it in a `with` statement.

    Settings come from `config` (a TOML file), then `TIDELOG_*` variables, then keywords, such as
    `fsync_interval_ms=100`. With `read_only=True` it can be open in another process at the same time; nothing is
    changed, and what that process writes can be followed.
    """
    overrides = dict(settings) if dir is None else {**settings, "dir": _checked_path(dir)}
    loaded = load_settings(None if config is None else Path(config), os.environ, overrides)
    if loaded.dir is None:
        raise ConfigError(
            "no directory was named", hint='Give it: tidelog.open("./data"), `dir` in the config, or TIDELOG_DIR'
        )
    return LogDirectory(Path(loaded.dir), loaded.log, read_only=read_only)


def _checked_path(path: str | os.PathLike[str]) -> str:
    """An empty path is refused: it would mean the working directory, and is an unset variable as a rule."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"a directory is a str or a Path, not {type(path).__name__}")
    text = os.fspath(path)
    if not text:
        raise ConfigError("the name of the directory is empty", hint='The working directory is "."')
    return text

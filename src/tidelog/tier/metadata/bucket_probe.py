"""Proves that an object store honours conditional writes, before metadata is trusted to it.

Some servers that speak S3 take If-None-Match and If-Match and ignore them: two owners would then overwrite each other
without a word. So every answer that the metadata store relies on is asked for once, on an object of its own.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

from tidelog.errors import ConfigError, ConflictError, TidelogError
from tidelog.tier.object_store import ObjectStore

PREFIX = "tidelog-probe/"
_HINT = (
    "Keep the metadata in sqlite:///path or etcd://host:port, or use a server that honours If-None-Match and If-Match"
)


def prove_conditional_writes(objects: ObjectStore) -> None:
    """ConfigError when the store cannot be trusted with metadata; nothing stays behind."""
    if not objects.supports_conditional_update:
        raise ConfigError(f"{objects.url} cannot replace an object on a condition", hint=_HINT)
    key = f"{PREFIX}{secrets.token_hex(16)}"
    try:
        _prove(objects, key)
    except ConflictError as error:
        raise _refused(objects, "refuses a write whose condition holds") from error
    finally:
        with contextlib.suppress(TidelogError):  # what went wrong before is what has to be seen
            objects.delete(key)


def _prove(objects: ObjectStore, key: str) -> None:
    first = objects.put_if_absent(key, b"first")
    _must_conflict(objects, "ignores If-None-Match", lambda: objects.put_if_absent(key, b"again"))
    second = objects.put_if_match(key, b"second", first)
    _must_conflict(objects, "ignores If-Match", lambda: objects.put_if_match(key, b"stale", first))
    found = objects.get(key)
    if found != (b"second", second) or first == second:
        raise _refused(objects, "does not show what was just written")
    if [info.key for info in objects.list(PREFIX) if info.key == key] != [key]:
        raise _refused(objects, "does not list what was just written")
    objects.delete(key)
    _must_conflict(objects, "ignores If-Match", lambda: objects.put_if_match(key, b"gone", second))


def _must_conflict(objects: ObjectStore, fault: str, write: Callable[[], str]) -> None:
    try:
        write()
    except ConflictError:
        return
    raise _refused(objects, fault)


def _refused(objects: ObjectStore, fault: str) -> ConfigError:
    return ConfigError(f"{objects.url} cannot hold metadata: the server {fault}", hint=_HINT)

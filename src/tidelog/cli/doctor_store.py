"""What `tidelog doctor` asks the store of a log directory: can it be reached, written, and trusted with a catalog."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from tidelog.cli.doctor_checks import Check
from tidelog.cli.session import Session
from tidelog.errors import ConfigError, TidelogError
from tidelog.files import LocalFiles
from tidelog.tier.keys import topics_prefix
from tidelog.tier.metadata.bucket_probe import PREFIX, prove_conditional_writes
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.stores import open_store
from tidelog.topics.directory_info import INSIDE, LOCAL, METADATA_FILE, Place, metadata_url, read_info, settle_place

_MAX_SKEW_SECONDS = 60
_CLOCK_FIX = "Let a time service keep the clock: signed requests are refused when it is wrong by minutes"


def store_checks(session: Session) -> dict[str, Callable[[], Check]]:
    """The checks of the store; none for a directory in local mode."""
    try:
        place = _place_of(session)
    except TidelogError as error:
        return {"store": lambda error=error: _raise(error)}  # type: ignore[misc]
    if place.store is None:
        return {}
    return {"store": lambda: check_store(session, place), "metadata": lambda: check_metadata(session, place)}


def _raise(error: TidelogError) -> Check:
    raise error


def _place_of(session: Session) -> Place:
    """What the directory remembers, or what is named where there is none yet."""
    known = read_info(LocalFiles(), session.root) if session.root.is_dir() else None
    named = Place(session.settings.store, session.settings.metadata)
    return settle_place(session.root, LOCAL if known is None else known.place, named)


def _open(session: Session, place: Place) -> ObjectStore:
    assert place.store is not None
    return open_store(place.store, session.settings.object_store)


def check_store(session: Session, place: Place) -> Check:
    """Writes a small object, reads it, and compares its time with ours."""
    objects = _open(session, place)
    key = f"{PREFIX}{secrets.token_hex(16)}"
    begin = time.monotonic()
    objects.put(key, b"doctor")
    written_seconds, now = time.monotonic() - begin, time.time()
    try:
        info = objects.head(key)
        data = objects.get(key).data
    finally:
        objects.delete(key)
    if data != b"doctor":
        return Check("store", "fail", f"{objects.url} gives back other bytes than were written", "Use another store")
    skew_seconds = info.modified_us / 1e6 - now
    detail = f"{objects.url} can be read and written ({written_seconds * 1000:.0f} ms for a small object)"
    if abs(skew_seconds) > _MAX_SKEW_SECONDS:
        return Check("store", "warn", f"{detail}; its clock and ours are {abs(skew_seconds):.0f} s apart", _CLOCK_FIX)
    return Check("store", "ok", detail)


def check_metadata(session: Session, place: Place) -> Check:
    """Reads the catalog; where that is in the bucket, proves that its conditional writes hold."""
    assert place.metadata is not None
    objects = _open(session, place)
    if place.metadata == INSIDE and not Path(session.root, METADATA_FILE).exists():
        return Check("metadata", "ok", f"{METADATA_FILE} does not exist yet and is made in {session.root}")
    if place.metadata == BUCKET:
        try:
            prove_conditional_writes(objects)
        except ConfigError as error:
            return Check("metadata", "fail", error.message, error.hint or "")
    store = open_metadata_store(metadata_url(session.root, place.metadata), objects, read_only=True)
    try:
        found = store.keys(topics_prefix(session.settings.metadata_root), limit=1)
    finally:
        store.close()
    honours = ", conditional writes are honoured" if place.metadata == BUCKET else ""
    return Check("metadata", "ok", f"{place.metadata}: {'has' if found else 'has no'} topics{honours}")

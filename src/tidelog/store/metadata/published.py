"""A metadata store whose catalogs are published in the bucket too: readers, Spark and restores need only the bucket.

    {root}/storage/topics/{namespace}/{topic}/...    the copy of each public document, as `bucket.py` would hold it
    .../owner                                        with two more fields: {"copy_of": "etcd://host:2379", "copied": 17}

After each commit the documents that it changed are copied. The metadata store stays the truth, and nothing is decided
by a copy: a bucket metadata store that is open for writing refuses a topic whose owner document says `copy_of`.

Invariants
- A copy never goes back, whoever races (owners, jobs, late processes). It is written in this order: read the copy and
  its version, then read the truth, then replace the copy on that version, or begin again. So the truth was read after
  whatever the copy had was written. A copy that was created or removed has no version to go by: there the truth is
  read once more after the write, until both agree.
- A copy is replaced only if it is one of this topic: the owner documents have the same log id, or the one in the bucket
  is a copy of this very metadata store. A foreign one is left alone, and reported. Nodes may reach one metadata store
  by different addresses, so another URL alone does not make a copy foreign.
- A copy is derived data: a damaged document of it is replaced like one that is out of date. If that is the owner's, the
  others say whose copy it is.
- The owner document goes first and is removed last; descriptors are copied before `cur`, and removed after all others
  were copied: the orders of `bucket.py`.
- An object goes after the copy has stopped naming it (`copy_is_current`); if it cannot, the object stays for a later
  collection of garbage.
- The copy of a deleted topic is removed before the last document of the truth: nobody would remove it later.
- Offsets of consumer groups change all the time, and a node that takes over claims many topics at once. With
  `runs_in_background` their copies are made together, some seconds later, or with the next one of the same topic; all
  others soon after the commit.
- A bucket that does not answer fails no commit (except that last one of a deletion): the document is out of date, and
  is copied with a later commit, in the background, or when the topic is next claimed. `copy_statistics` shows it.
- A topic with partitions has no owner, its partitions have: there the document of its partitions says `copy_of`.
- A claim compares all documents of its topic once, for a process that died between commit and copy; that of a partition
  those of the whole topic as well. `copied` is the version of the truth up to which that was done: descriptors that are
  not newer need not be read again.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from threading import Lock
from typing import NamedTuple

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import ConfigError, ConflictError, StoreUnavailableError, TidelogError
from tidelog.store.document import ATTEMPTS
from tidelog.store.keys import GROUPS, OwnedKey, parse_owned_key
from tidelog.store.metadata.base import (
    Check,
    CopyStatistics,
    DelegatingMetadata,
    Delete,
    Entry,
    MetadataStore,
    Put,
    Write,
)
from tidelog.store.metadata.bucket import COPY_OF, DAMAGED, BucketMetadataStore, copy_of, prove_conditional_writes
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, Background, in_parallel

_logger = logging.getLogger("tidelog.cold")
_COPIED = "copied"
_PRIVATE = ("staging", "producers", "replays/")
"""What only owners and writers need."""
_AT_ONCE = ("segments/", "start", "manifest")
"""What belongs to objects that were just uploaded, or are about to be deleted: copied before the commit returns."""
_OFTEN = (f"subscriptions/{GROUPS}/",)
"""What changes all the time: each copy costs a request, so those of some seconds are one."""
_OFTEN_SECONDS = 10.0
_CLAIM = ("owner", "epochs")
"""What a claim changes of a topic that is there: a node that takes over hundreds copies it once they are open."""
_WRITES_AT_ONCE = 8
_KEYS_A_THREAD = 16
_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0


class PublishedMetadata(DelegatingMetadata):
    """A metadata store and its copy in the bucket.

    With `runs_in_background` a commit waits only for copies that belong to objects; the others are made soon after.
    """

    def __init__(self, store: MetadataStore, objects: ObjectStore, *, runs_in_background: bool = False) -> None:
        super().__init__(store)
        self._objects = objects
        self._copies = BucketMetadataStore(objects, takes_copies=True)
        self._runs_in_background = runs_in_background
        self._guard = Lock()
        self._topics: dict[str, _Topic] = {}
        self._background = Background(1, "tidelog-copy")
        self._task = self._background.add(self._copy_later, NEVER)
        self._postponed: dict[str, dict[str, OwnedKey]] = {}
        """By topic."""
        self._often = self._background.add(self._copy_postponed, NEVER)
        self._retry_at = float("-inf")
        self._pause_seconds = _RETRY_SECONDS
        self._errors = 0
        self._is_proven = False

    def copy_statistics(self) -> CopyStatistics | None:
        behind = self._behind()
        since = [change.since for topic in behind for change in list(topic.behind.values())]
        return CopyStatistics(
            url=self._objects.url,
            behind=len(since),
            behind_seconds=time.monotonic() - min(since) if since else 0.0,
            errors=self._errors,
            last_error=next((topic.error for topic in behind if topic.error is not None), None),
        )

    def copy_is_current(self, key: str) -> bool:
        owned = parse_owned_key(key)
        if owned is None:
            return True
        self._take_postponed()
        topic = self._topic(owned)
        if owned.rest:
            topic.changed(key)  # by another process, perhaps
        else:
            topic.compares = True
        self._copy([topic])
        return topic.is_current

    def close(self) -> None:
        """Copies what is left, unless the bucket takes long to answer."""
        self._often.cancel()
        self._task.cancel()
        self._take_postponed()
        if self._behind():
            self._background.attempt(self._copy_all)
        self._background.close()
        self._copies.close()
        self.store.close()

    # Commits

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        changed = [owned for write in writes if (owned := _public(write.key)) is not None]
        ended = [one for one in changed if one.is_head and Delete(one.key) in writes and self._is_last(one)]
        for one in ended:
            self._forget_postponed(one)
            self._topic(one).remove_copy()
        try:
            versions = self.store._commit(checks, writes)
        except (ConflictError, StoreUnavailableError) as error:
            for one in ended:  # of which there may be another owner by now
                self._topic(one).compares = True
            self._changed(changed if isinstance(error, StoreUnavailableError) else ended)
            raise
        created = {check.key for check in checks if check.version is None}
        first = [one for one in changed if one.is_head and self._topic(one).claimed(one.key in created)]
        wholes = [one.layout for one in first if one.layout is not None and self._topic(one.layout).claimed()]
        replaced = {check.key for check in checks if check.version is not None and Delete(check.key) not in writes}
        late = {one.key for one in changed if one.rest in _CLAIM and one.key in replaced}
        self._changed([*wholes, *(one for one in changed if one not in ended)], late)
        return versions

    def _is_last(self, owned: OwnedKey) -> bool:
        """Whether this document is all that the truth has: a rebuild removes an owner too, to write it again."""
        return self.store.keys(owned.prefix, limit=2) == [owned.key]

    def _changed(self, changed: Sequence[OwnedKey], late: Collection[str] = ()) -> None:
        """`late`: the keys of documents whose copies may be made some seconds later."""
        if self._runs_in_background:
            changed = self._without_postponed(changed, late)
        if not changed:
            return
        for one in changed:
            self._topic(one).changed(one.key)
        topics = {one.prefix: self._topic(one) for one in changed}
        if self._runs_in_background and not any(one.rest.startswith(_AT_ONCE) for one in changed):
            self._task.wake()
        elif time.monotonic() >= self._retry_at:
            self._copy(topics.values())
        if self._runs_in_background and any(topic.behind for topic in topics.values()):
            self._task.wake()

    def _without_postponed(self, changed: Sequence[OwnedKey], late: Collection[str]) -> list[OwnedKey]:
        """Those of which a copy is made soon, with what was postponed of the same topics."""
        soon = [one for one in changed if one.key not in late and not one.rest.startswith(_OFTEN)]
        kept = set(soon)
        with self._guard:
            for one in changed:
                if one not in kept:
                    self._postponed.setdefault(one.prefix, {})[one.key] = one
            for prefix in {one.prefix for one in soon}:
                soon += self._postponed.pop(prefix, {}).values()
        if len(kept) < len(changed):
            self._often.wake(_OFTEN_SECONDS)
        return soon

    def _copy_postponed(self) -> float:
        if self._take_postponed():
            self._task.wake()
        return NEVER

    def _forget_postponed(self, ended: OwnedKey) -> None:
        """The copy of a topic that is deleted is removed as a whole."""
        with self._guard:
            self._postponed.pop(ended.prefix, None)

    def _take_postponed(self) -> bool:
        """From here on they are documents that are out of date, as others; whether there were some."""
        with self._guard:
            postponed, self._postponed = self._postponed, {}
        for one in [one for some in postponed.values() for one in some.values()]:
            self._topic(one).changed(one.key)
        return bool(postponed)

    def _topic(self, owned: OwnedKey) -> _Topic:
        with self._guard:
            if owned.prefix not in self._topics:
                self._topics[owned.prefix] = _Topic(owned, self.store, self._copies, self._objects, self._prove)
            return self._topics[owned.prefix]

    def _prove(self) -> None:
        """Once, before the first copy is created: what is there already was created after such a proof."""
        if not self._is_proven:
            try:
                prove_conditional_writes(self._objects)
            except ConfigError:
                self._retry_at = NEVER
                raise
            self._is_proven = True

    # Copying

    def _behind(self) -> list[_Topic]:
        with self._guard:
            return [topic for topic in self._topics.values() if topic.behind]

    def _copy_all(self) -> None:
        self._copy(self._behind())

    def _copy_later(self) -> float:
        if (wait_seconds := self._retry_at - time.monotonic()) > 0:
            return wait_seconds
        self._copy_all()
        if not self._behind():
            self._pause_seconds = _RETRY_SECONDS
            return NEVER
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_RETRY_SECONDS)
        return max(self._pause_seconds, self._retry_at - time.monotonic())

    def _copy(self, topics: Iterable[_Topic]) -> None:
        for topic in topics:
            begin = time.monotonic()
            try:
                topic.copy()
            except TidelogError as error:
                before, topic.error = topic.error, str(error)  # a traceback would keep open what it was about
                if before is None:
                    shown = (topic.prefix, self._objects.url, topic.error)
                    _logger.warning("%s: its copy in %s is out of date: %s", *shown)
                self._errors += 1
                # A bucket that took long to fail is asked seldom: the next commit must not wait for it again.
                now = time.monotonic()
                self._retry_at = max(self._retry_at, now + min(4 * (now - begin), _LONGEST_RETRY_SECONDS))


class _Change(NamedTuple):
    """A document that is out of date: since when, and which change of it was the last."""

    since: float
    number: int


class _Topic:
    """The documents of one topic or engine, and their copies."""

    def __init__(
        self,
        owned: OwnedKey,
        truth: MetadataStore,
        copies: BucketMetadataStore,
        objects: ObjectStore,
        prove: Callable[[], None],
    ) -> None:
        self.prefix = owned.prefix
        self.behind: dict[str, _Change] = {}
        self.error: str | None = None
        self.compares = False
        self._heads = owned.heads
        self._head = owned.owner
        self._truth = truth
        self._copies = copies
        self._objects = objects
        self._prove = prove
        self._changes = itertools.count()
        self._copying = Lock()
        self._is_created = False
        self._forget()

    def _forget(self) -> None:
        self._was_claimed = False
        self._is_ours = False
        self._has_copy = True
        self._copied: int | None = None

    @property
    def is_current(self) -> bool:
        """Whether the last attempt to copy succeeded, or there is no copy: a server without conditional writes has
        none.
        """
        return not self._has_copy or (self._is_ours and self.error is None)

    def changed(self, key: str) -> None:
        """The copy of this document is out of date."""
        known = self.behind.get(key)
        self.behind[key] = _Change(time.monotonic() if known is None else known.since, next(self._changes))

    def claimed(self, is_created: bool = False) -> bool:
        """The first claim in this process compares all that is there; whether it is the first.

        Where a topic is created, or rebuilt, a mark in its copy is that of a truth that is gone.
        """
        is_first = not self._was_claimed
        self._was_claimed, self.compares = True, self.compares or is_first
        self._is_created = self._is_created or is_created
        return is_first

    def copy(self) -> None:
        """Brings the copy up to date."""
        with self._copying:
            behind, compares = dict(self.behind), self.compares
            head = self._found_head()
            if head is None:
                self._forget()  # a claim, or the end of a rebuild, makes one, and compares all
            else:
                self._require_ours(head)
                if compares or self._copied is None:
                    self._compare()
                else:
                    self._bring(list(behind))
                self.compares = False
            self.error = None
            for key, change in behind.items():
                if self.behind.get(key) == change:
                    del self.behind[key]

    def remove_copy(self) -> None:
        """The topic is deleted."""
        with self._copying:
            head = self._found_head()
            try:
                if head is not None:
                    self._require_ours(head)
            except ConfigError:
                return
            self._copies.purge([info.key for info in self._objects.list(self.prefix) if info.key not in self._heads])
            self._copies.purge(self._heads)
            self._forget()
            self.behind.clear()

    def _found_head(self) -> Entry | None:
        """The document that says in the copy that it is one: the owner's, or how a topic has partitions."""
        for key in self._heads:
            if (found := self._truth.get(key)) is not None:
                self._is_ours = self._is_ours and key == self._head
                self._head = key
                return found
        return None

    def _require_ours(self, head: Entry) -> None:
        if self._is_ours:
            return
        found = self._copies.get(self._head)
        self._has_copy = found is not None
        if found is not None:
            document, truth = _decoded(found), _decoded(head)
            is_known = copy_of(found) == self._truth.url or (found.value == DAMAGED and self._others_are_ours())
            if not is_known and not _is_same(document, truth):
                raise ConfigError(
                    f"{self.prefix} in {self._copies.url} is the catalog of another log"
                    + (f", whose metadata is in {other}" if (other := copy_of(found)) is not None else ""),
                    operation="publish",
                    hint="One of the two has the wrong store, or the wrong metadata",
                )
            copied = document.get(_COPIED)
            self._copied = copied if is_known and isinstance(copied, int) and not self._is_created else None
        self._is_ours = True

    def _others_are_ours(self) -> bool:
        """Whether a copy with a damaged head is one of this topic: objects and times differ from one log to another."""
        told = [key for key in self._copies.keys(self.prefix) if _tells_logs_apart(key)]
        copies, truth = self._copies.get_many(told), self._truth.get_many(told)
        return not told or any(key in truth and truth[key].value == one.value for key, one in copies.items())

    def _compare(self) -> None:
        names = set(self._copies.keys(self.prefix))
        entries = {one.key: int(one.version) for one in self._truth.range(self.prefix) if _public(one.key) is not None}
        newest = max(entries.values(), default=0)
        # A mark from after the newest change is that of another store, which this one has replaced.
        copied = self._copied if self._copied is not None and self._copied <= newest else 0
        same = {key for key, version in entries.items() if version <= copied and key in names}
        if self._head not in names:
            self._prove()  # and readers find the topic when all of it is there
        elif self._copied is None:
            self._bring([self._head])
        self._bring(sorted({*names, *entries} - same - {self._head}))
        self._copied = newest
        self._bring([self._head])
        self._has_copy, self._is_created = True, False

    def _bring(self, keys: Sequence[str]) -> None:
        """Makes the copies of these keys equal to the truth."""
        copies: dict[str, Entry | None] = dict(self._copies.get_many(keys))
        for _ in range(ATTEMPTS):
            truth = self._truth.get_many(keys)
            wanted = {key: self._copy_value(entry) for key, entry in truth.items()}
            written = partial(self._write, wanted, copies)
            again: list[str] = []
            for rank in _Rank:
                some = [key for key in keys if _rank(key, key in wanted) is rank]
                threads = min(1 + len(some) // _KEYS_A_THREAD, _WRITES_AT_ONCE)
                again += [key for key in in_parallel(written, some, threads, "tidelog-copy") if key is not None]
            if not again:
                return
            keys = again
        raise ConflictError(f"gave up after {ATTEMPTS} conflicting writes to the copy of {keys[0]}")

    def _write(self, wanted: Mapping[str, bytes], copies: dict[str, Entry | None], key: str) -> str | None:
        """Makes one copy what it should be; the key if that has to be looked at again."""
        known, value = copies.get(key), wanted.get(key)
        if value == (None if known is None else known.value) or (value is None and key in self._heads):
            return None
        try:
            if value is None:
                assert known is not None
                self._copies.remove(key, known.version)
                copies[key] = None
                return key
            check = Check(key, None if known is None else known.version)
            copies[key] = Entry(key, value, self._copies.commit([check], [Put(key, value)])[key])
        except ConflictError:
            copies[key] = self._copies.get(key)
            return key
        return key if known is None else None

    def _copy_value(self, entry: Entry) -> bytes:
        if entry.key != self._head:
            return entry.value
        return msgspec.json.encode({**_decoded(entry), COPY_OF: self._truth.url, _COPIED: self._copied})


class _Rank(Enum):
    """In which order copies are written."""

    OWNER = auto()
    DOCUMENT = auto()
    CURRENT = auto()
    REMOVAL = auto()


def _rank(key: str, is_there: bool) -> _Rank:
    if not is_there:
        return _Rank.REMOVAL
    owned = parse_owned_key(key)
    rest = "" if owned is None else owned.rest
    return {"owner": _Rank.OWNER, "segments/cur": _Rank.CURRENT}.get(rest, _Rank.DOCUMENT)


def _public(key: str) -> OwnedKey | None:
    """The key taken apart if readers need what is there."""
    owned = parse_owned_key(key)
    return None if owned is None or owned.rest.startswith(_PRIVATE) else owned


def _tells_logs_apart(key: str) -> bool:
    owned = parse_owned_key(key)
    return owned is not None and owned.rest.startswith(_AT_ONCE) and _rank(key, True) is not _Rank.CURRENT


def _is_same(copy: Mapping[str, object], truth: Mapping[str, object]) -> bool:
    """Whether a head is one of the same log. A topic with partitions has no log id: its layout, or one that it had."""
    if "log_id" in copy or "log_id" in truth:
        return copy.get("log_id") == truth.get("log_id")
    earlier = truth.get("earlier_counts")
    layout = {name: value for name, value in copy.items() if name not in (COPY_OF, _COPIED)}
    return bool(layout) and (layout == truth or (isinstance(earlier, list) and layout.get("count") in earlier))


def _decoded(owner: Entry) -> dict[str, object]:
    """What cannot be understood has nothing in it."""
    try:
        return msgspec.json.decode(owner.value, type=dict[str, object])
    except JSON_ERRORS:
        return {}

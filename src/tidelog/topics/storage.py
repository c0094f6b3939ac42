"""A log directory: the topics in it, made, opened once each, listed and deleted.

    <root>/tidelog.json            what this directory is, remembered from its first opening
    <root>/metadata.db             the catalog, where it is not kept elsewhere; else positions of subscriptions alone
    <root>/.lock                   held by the owner
    <root>/<namespace>/<name>/     one topic: topic.json and the files of its log
    <root>/.deleted/               topics on their way out

Invariants
- A topic exists when its `topic.json` does, or WAL files that lost theirs, or an owner in the catalog.
- A topic is opened once: all callers share one `Topic`, so there is never a second writer in this process. Several
  topics may be opened at the same time; who asks for one that another thread is opening waits for it, and so does
  whoever closes the directory.
- Deleting is one rename, then a removal that can be finished later; a crash leaves all of a topic or none of it. What
  a store has of it goes before, by a plan that whoever opens the topic next finishes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Condition, Lock, RLock
from types import TracebackType
from typing import Unpack

from tidelog.clock import Clock, SystemClock
from tidelog.errors import ClosedError, FencedError, InputError, NotFoundError, TidelogError
from tidelog.files import Files, LocalFiles, explained
from tidelog.files import Lock as FileLock
from tidelog.log import LogSettings, stopping
from tidelog.log.bound_files import bound
from tidelog.memory_files import MemoryFiles
from tidelog.tier.background import Background
from tidelog.tier.in_parallel import in_parallel
from tidelog.tier.keys import TopicKeys
from tidelog.tier.metadata.memory import MemoryMetadataStore
from tidelog.tier.metadata.sqlite import SqliteMetadataStore
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.tier import Tier
from tidelog.tier.tier_settings import TierOptions, TierSettings
from tidelog.topics.cursor_store import CatalogCursors, CursorStore, LocalCursors, bring_along
from tidelog.topics.directory_info import (
    DIRECTORY_FILE,
    INSIDE,
    LOCAL,
    METADATA_FILE,
    DirectoryInfo,
    Place,
    introduce,
    is_remembered,
    read_info,
    remember,
    settle_place,
)
from tidelog.topics.local_intake import LocalIntakes
from tidelog.topics.names import TopicName, is_name_part, parse_topic_name
from tidelog.topics.topic import Topic
from tidelog.topics.topic_info import is_topic_directory
from tidelog.topics.topic_opener import TopicOpener
from tidelog.topics.topic_tasks import DirectoryTasks

_logger = logging.getLogger("tidelog.topics")
_LOCK_FILE = ".lock"
_DELETED = ".deleted"
_OPENED_AT_ONCE = 16
_CLOSED_AT_ONCE = 16

OpenTier = Callable[[DirectoryInfo], Tier]


class LogDirectory(DirectoryTasks):
    """An open log directory; `tidelog.open` makes one. Use it as a context manager or close it."""

    def __init__(
        self,
        root: Path,
        settings: LogSettings | None = None,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        read_only: bool = False,
        place: Place = LOCAL,
        open_tier: OpenTier | None = None,
        tier_settings: TierSettings | None = None,
    ) -> None:
        """`place` names store and metadata; `open_tier` opens them once it is settled which ones are meant."""
        self.root = root
        self.read_only = read_only
        self._files = bound(files)
        self._clock = clock or SystemClock()
        self._guard = RLock()
        self._opening_changed = Condition(self._guard)
        self._opening: set[TopicName] = set()
        self._topics: dict[TopicName, Topic] = {}
        self._lock: FileLock | None = None
        self._closed = False
        self.info = self._look(place) if read_only else self._take(place)
        self._background = Background(1, "tidelog-local")
        self._metadata_guard = Lock()
        self._local_metadata: MetadataStore | None = None
        self._inherited_metadata: MetadataStore | None = None
        self.tier: Tier | None = None
        try:
            self.tier = None if self.info.store is None else _opened(open_tier, self.info)
            if not read_only:
                self._remember()
        except BaseException:
            if self.tier is not None:
                self.tier.close()
            self._release_lock()
            raise
        self._intakes = LocalIntakes(
            *(root, self._metadata, self._clock), runs_in_background=isinstance(self._files.below, LocalFiles)
        )
        self._opener = TopicOpener(
            *(root, self._files, self._clock, settings or LogSettings()),
            *(tier_settings or TierSettings(), self.tier, self._background, self._intakes),
        )
        if not read_only:
            stopping.closes_at_exit(self, has_others=True)

    @property
    def mode(self) -> str:
        """`local`, `shared_fs` or `object_store`."""
        if self.info.store is None:
            return "local"
        return "shared_fs" if self.info.store.startswith("file:") else "object_store"

    def _look(self, place: Place) -> DirectoryInfo:
        is_there = self._files.is_directory(self.root)
        with explained("open", self.root):
            known = read_info(self._files, self.root) if is_there else None
        if known is None and place.store is None:
            why = f"there is no {DIRECTORY_FILE} in it" if is_there else "there is no such directory"
            raise NotFoundError(
                f"this is not a log directory: {why}",
                path=self.root,
                hint="Check the path; a log directory is made when a topic is first written there",
            )
        settled = settle_place(self.root, LOCAL if known is None else known.place, place)
        return DirectoryInfo(
            format=1,
            created_us=0 if known is None else known.created_us,
            node="" if known is None else known.node,
            store=settled.store,
            metadata=settled.metadata,
        )

    def _take(self, place: Place) -> DirectoryInfo:
        with explained("open", self.root):
            self._files.make_directories(self.root)
            self._lock = self._files.lock(self.root / _LOCK_FILE)
            try:
                info = introduce(self._files, self.root, self._clock, place)
                self._finish_deletions()
            except BaseException:
                self._lock.release()
                raise
        return info

    def _remember(self) -> None:
        """Writes down what this directory is, if that is news and, with a store, once that has answered."""
        with explained("open", self.root):
            if is_remembered(self._files, self.root, self.info):
                return
            if self.tier is not None:
                self.tier.check_reachable()
            remember(self._files, self.root, self.info)

    # Topics

    def topic(
        self,
        name: str,
        *,
        first_offset: int = 0,
        reliable: bool | None = None,
        take_over: bool = False,
        **settings: Unpack[TierOptions],
    ) -> Topic:
        """The topic of this name, always the same object while the directory is open.

        It is made when absent, and begins at `first_offset` then; a directory that is open for reading only raises
        NotFoundError instead. `settings` are the topic's own, such as `retention_seconds=86400`: they are remembered,
        and None takes one back. They count from the next opening on where the topic is open already. A new topic with
        `reliable=False` keeps nothing: its messages go to whoever reads or subscribes at that moment, in this process.
        That is remembered too, and cannot be changed.

        HeldError while another node has the topic open: `take_over=True` takes it from there, and what that node had
        accepted and not shipped stays on its disk for `tidelog topic rescue`.
        """
        parsed = parse_topic_name(name)
        known = self._topics.get(parsed)
        is_known = known is not None and reliable in (None, known.is_reliable)
        if known is not None and is_known and not settings and not self._closed:
            return known  # without the guard, which somebody may hold who opens another topic in a store that is slow
        with explained(f"topic {name}", self.root), self._opening_alone(parsed):
            opened = self._topics.get(parsed)
            if opened is not None and settings:
                raise InputError(f"the topic {name} is open already", hint="Change its settings with `configure_topic`")
            if opened is None:
                opened = self._open_topic(parsed, first_offset, dict(settings), reliable, take_over)
                opened.use_subscriptions(self._cursors(parsed, opened), self._background, self._dead_letter_topic)
                self._topics[parsed] = opened
            if reliable not in (None, opened.is_reliable):
                raise InputError(
                    f"the topic {name} has reliable={opened.is_reliable}, and that cannot be changed",
                    hint="Take another name, or delete it first",
                )
            return opened

    def open_topics(self, names: Sequence[str]) -> list[Topic]:
        """The topics of these names, in their order, opened several at a time: as `topic` for each, and sooner.

        What waits for a disk or a store waits at the same time. When some cannot be opened, the others are open, and
        the first error is raised.
        """
        in_parallel(self.topic, list(dict.fromkeys(names)), _OPENED_AT_ONCE, "tidelog-open")
        return list(map(self.topic, names))

    @contextlib.contextmanager
    def _opening_alone(self, name: TopicName) -> Iterator[None]:
        """Nobody else opens this topic meanwhile."""
        with self._guard:
            self._wait_while_opening(name)
            self._check_open()
            self._opening.add(name)
        try:
            yield
        finally:
            with self._guard:
                self._opening.discard(name)
                self._opening_changed.notify_all()

    def _wait_while_opening(self, name: TopicName) -> None:
        """Under the guard, which is free meanwhile: until no other thread is opening this topic."""
        self._opening_changed.wait_for(lambda: name not in self._opening)

    def _dead_letter_topic(self, name: str) -> Topic:
        """One that keeps them."""
        return self.topic(name, reliable=True)

    def configure_topic(self, name: str, **settings: Unpack[TierOptions]) -> dict[str, object]:
        """Changes the settings that a topic has for itself, and returns all of them; None takes one back.

        They are remembered, in the catalog where there is one, and count from the topic's next opening on.
        """
        parsed = parse_topic_name(name)
        with self._guard, explained(f"topic {name}", self.root):
            self._check_writable()
            self._wait_while_opening(parsed)
            self._require(parsed)
            return self._opener.configure(parsed, settings)

    def _open_topic(
        self, name: TopicName, first_offset: int, settings: dict[str, object], reliable: bool | None, take_over: bool
    ) -> Topic:
        if self.read_only:
            if settings or first_offset:
                self._check_writable()
            return self._opener.look(name)
        return self._opener.open(name, self._seal, settings, first_offset, reliable, take_over=take_over)

    def _cursors(self, name: TopicName, topic: Topic) -> CursorStore:
        """Where the positions of a topic's subscriptions are."""
        local = LocalCursors(self._metadata, TopicKeys(name.namespace, name.name), self._clock)
        if self.tier is None:
            if topic.is_reliable and not self.read_only:
                local.clip(topic.next_offset)
            return local
        cursors = CatalogCursors(self.tier.catalog(name.namespace, name.name), topic.tiered)
        if topic.tiered is not None and self.info.metadata != INSIDE:
            bring_along(local, cursors)
        return cursors

    def _metadata(self, make: bool) -> MetadataStore | None:
        """The metadata file of a directory without a store: subscriptions need it, the first one makes it, and what
        other processes hand over."""
        with self._metadata_guard:
            self._check_open()
            path = self.root / METADATA_FILE
            if self._local_metadata is None and (make or path.exists()):
                in_memory = isinstance(self._files.below, MemoryFiles)
                self._local_metadata = MemoryMetadataStore() if in_memory else SqliteMetadataStore(path)
            return self._local_metadata

    def has_topic(self, name: str) -> bool:
        """Whether the topic exists."""
        self._check_open()
        return self._opener.exists(parse_topic_name(name))

    def topics(self) -> list[str]:
        """The names of all topics, sorted: those on this disk and those in the catalog."""
        self._check_open()
        found = set(self._local_topics())
        if self.tier is not None:
            found |= {str(TopicName(*topic)) for topic in self.tier.topics() if all(map(is_name_part, topic))}
        return sorted(found)

    def _local_topics(self) -> list[str]:
        if not self._files.is_directory(self.root):
            return []
        names = [
            TopicName(namespace, name)
            for namespace in self._folders(self.root)
            for name in self._folders(self.root / namespace)
        ]
        return [str(name) for name in names if is_topic_directory(self._files, name.directory(self.root))]

    def topic_directory(self, name: str) -> Path:
        """Where the files of an existing topic are, or would be: all of it may be in the store."""
        parsed = parse_topic_name(name)
        self._require(parsed)
        return parsed.directory(self.root)

    def delete_topic(self, name: str, *, take_over: bool = False) -> None:
        """Removes a topic and everything in it, for good, from the disk and from the store. Its open readers end.

        HeldError while another node has it open, unless `take_over`.
        """
        parsed = parse_topic_name(name)
        with self._guard, explained(f"delete topic {name}", self.root):
            self._check_writable()
            self._wait_while_opening(parsed)
            self._require(parsed)
            if self.tier is not None:
                self.topic(name, take_over=take_over)  # what is in the store is only its owner's to delete
            self._delete_storage(parsed)
            self._delete_local_metadata(parsed)
            self._delete_directory(parsed)
            self._opener.forget_namespace(parsed)

    def _delete_storage(self, name: TopicName) -> None:
        topic = self._topics.pop(name, None)
        if topic is None:
            return
        try:
            topic.delete_storage()
        except TidelogError as error:
            # Opened anew it would be taken back from its owner, or from itself, which nobody asked for.
            if isinstance(error, FencedError) or topic.is_open:
                self._topics[name] = topic
            raise

    def _delete_local_metadata(self, name: TopicName) -> None:
        """A topic that is made again under this name has no subscriptions, and nothing to take in."""
        if self.tier is None:
            self._intakes.delete(name)
            cursors = LocalCursors(self._metadata, TopicKeys(name.namespace, name.name), self._clock)
            for subscription in cursors.names():
                cursors.delete(subscription)

    def _seal(self, topic: Topic) -> None:
        """The topic is on its way to another owner; asked for again, it is opened again."""
        name = parse_topic_name(topic.name)
        with self._guard:
            self._check_open()
            if self._topics.get(name) is not topic:
                # One that was opened since has the same name, and is not what this caller means.
                raise ClosedError(f"the topic {name} is closed", path=self.root, hint="Ask for it again")
            topic.seal_storage()
            self._topics.pop(name, None)

    def _require(self, name: TopicName) -> None:
        if not self._opener.exists(name):
            raise NotFoundError(f"there is no topic {name}", path=self.root, hint="`tidelog topic list` shows them")

    def _folders(self, directory: Path) -> list[str]:
        names = self._files.list(directory)
        return [name for name in names if is_name_part(name) and self._files.is_directory(directory / name)]

    # Deleting

    def _delete_directory(self, name: TopicName) -> None:
        source = name.directory(self.root)
        if not self._files.is_directory(source):
            return
        graveyard = self.root / _DELETED
        self._files.make_own_directory(graveyard)
        self._files.rename(source, self._grave(graveyard))
        self._files.sync_directory(source.parent)
        self._files.sync_directory(graveyard)
        if not self._files.list(source.parent):
            self._files.remove_directory(source.parent)
        self._finish_deletions()

    def _grave(self, graveyard: Path) -> Path:
        """A free name; the topic's own two parts together may be longer than a file system allows."""
        number = self._clock.now_us()
        while self._files.exists(graveyard / str(number)):
            number += 1
        return graveyard / str(number)

    def _finish_deletions(self) -> None:
        graveyard = self.root / _DELETED
        if not self._files.has_own_directory(graveyard):
            return
        try:
            self._files.remove_tree(graveyard)
        except OSError as error:
            # What is in there is deleted already as far as anybody can see; it must not keep the others from opening.
            _logger.warning("%s: deleted topics could not be removed from the disk yet: %s", self.root, error)

    # Ending

    def close(self) -> None:
        """Flushes and closes every topic and gives the directory back. Closing twice is fine.

        The first error is raised once all is closed: FencedError when acknowledgements are lost because another node
        owns a topic now.
        """
        with self._guard:
            self._opening_changed.wait_for(lambda: not self._opening)
            if self._closed:
                return
            # All of them before any topic ends: one may have something to give up, and its letters go to another topic.
            lost = [error for topic in self._topics.values() for error in topic.close_subscriptions()]
            closed = in_parallel(_close_quietly, list(self._topics.values()), _CLOSED_AT_ONCE, "tidelog-close")
            failed = [error for error in closed if error is not None]
            self._background.close()
            self._intakes.close()
            if self._local_metadata is not None:
                self._local_metadata.close()
            if self.tier is not None:
                self.tier.close()
            self._release_lock()
            self._closed = True  # last: who was interrupted in here can close again
            stopping.no_longer_open(self)
        for error in (*failed, *lost):
            raise error

    def abandon(self) -> None:
        """In a forked child: the parent goes on, this copy lets go of the lock it inherited."""
        # Other threads of the parent may have held them.
        self._guard, self._metadata_guard = RLock(), Lock()
        self._opening_changed, self._opening = Condition(self._guard), set()
        self._closed = True
        # SQLite must not be used, nor closed, in a child: the parent's positions are not this copy's to move.
        self._inherited_metadata, self._local_metadata = self._local_metadata, None
        if self._lock is not None:
            self._lock.abandon()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> LogDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LogDirectory {self.root}{' closed' if self._closed else ''}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the log directory is closed", path=self.root, hint="Open it again")

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise InputError(
                "the log directory was opened with read_only=True", path=self.root, hint="Open it without read_only"
            )


def _opened(open_tier: OpenTier | None, info: DirectoryInfo) -> Tier:
    if open_tier is None:
        raise InputError(f"this directory has its history in {info.store}", hint="Open it with tidelog.open")
    return open_tier(info)


def _close_quietly(topic: Topic) -> TidelogError | None:
    try:
        topic.close_storage()
    except TidelogError as error:
        return error
    return None

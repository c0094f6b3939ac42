"""A log directory: creates, opens, lists and deletes its topics.

    <root>/tidelog.json            the identity of this directory, recorded when it is first opened
    <root>/metadata.db             the catalog, unless it is kept elsewhere; then subscription positions only
    <root>/.lock                   held by the owner
    <root>/<namespace>/<name>/     one topic: topic.json and the files of its log
    <root>/.deleted/               topics whose deletion is in progress

Invariants
- A topic exists if its `topic.json` exists, or WAL files that lost theirs, or an owner in the catalog.
- A topic is opened once: all callers share one `Topic`, so this process never has a second writer. Several topics may
  be opened concurrently; a caller that requests a topic that another thread is opening waits for it, and so does a
  caller that closes the directory.
- A deletion is one rename, followed by a removal that can be finished later; a crash leaves all of a topic or none of
  it. Its objects in the store are deleted first, following a plan that the next opener of the topic finishes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Condition, Lock, RLock
from typing import Unpack, cast, overload

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.cold.catalog import MAX_PARTITIONS, PartitionLayout
from tidelog.cold.cursor import Cursor
from tidelog.cold.ownership import give_back_unknown_claim
from tidelog.cold.settings import TierOptions, TierSettings
from tidelog.cold.tiered_log import Tier
from tidelog.errors import (
    ClosedError,
    DataError,
    FencedError,
    Hint,
    InputError,
    NotFoundError,
    TidelogError,
    TopicNameError,
)
from tidelog.files import Files, LocalFiles, explained
from tidelog.files import Lock as FileLock
from tidelog.log import LogSettings
from tidelog.log import shutdown as stopping
from tidelog.log.binding import bound
from tidelog.log.reader import check_first_offset
from tidelog.store.aio import ClosedAtExit, twin
from tidelog.store.document import encode_json
from tidelog.store.keys import DEFAULT_ROOT, TopicKeys
from tidelog.store.metadata.base import Delete, MetadataStore, Put
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.sqlite import SqliteMetadataStore
from tidelog.store.scheduler import Background, in_parallel
from tidelog.topics.base import BaseTopic
from tidelog.topics.directory_info import (
    INSIDE,
    LOCAL,
    METADATA_FILE,
    DirectoryInfo,
    Place,
    introduce,
    is_remembered,
    look_at,
    read_info,
    remember,
)
from tidelog.topics.ingest import LocalStagings
from tidelog.topics.live_topic import LiveTopic
from tidelog.topics.look import is_partition_of
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.topics.open import TopicOpener, bring_layouts_along
from tidelog.topics.partitioned import PartitionedTopic
from tidelog.topics.subscription.cursors import CatalogCursors, CursorStore, LocalCursors
from tidelog.topics.subscription.dead_letters import DeadLetterTopic, dead_letter_name, is_for_letters
from tidelog.topics.subscription.group_offsets import GroupOffsets
from tidelog.topics.topic import Topic

_logger = logging.getLogger("tidelog.topics")
_LOCK_FILE = ".lock"
_DELETED = ".deleted"
_OPENED_AT_ONCE = 16
_CLOSED_AT_ONCE = 16

OpenTier = Callable[[DirectoryInfo], Tier]


class LogDirectory(ClosedAtExit):
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
        self._log_settings = settings or LogSettings()
        self._files = bound(files)
        self._clock = clock or SystemClock()
        self._guard = RLock()
        self._opening_changed = Condition(self._guard)
        self._opening: set[TopicName] = set()
        self._topics: dict[TopicName, Topic | LiveTopic] = {}
        self._partitioned: dict[TopicName, PartitionedTopic] = {}
        self._watches: dict[TopicName, Callable[[], None]] = {}
        """What ends looking for rows that others stage for partitions."""
        self._divisions = 0
        """How often this process has recorded partitions of a topic."""
        self._shares_topics = False
        self._open_letters: Callable[[str], DeadLetterTopic] | None = None
        """Opens a topic for dead letters where several nodes share the topics."""
        """Whether other nodes serve topics of the same catalog, by agreement."""
        self._lock: FileLock | None = None
        self._was_local = False
        self._closed = False
        self._group_offsets = GroupOffsets(self)
        """The offsets that consumer groups of Kafka's protocol have committed."""
        self._info = look_at(self._files, root, place) if read_only else self._take(place)
        self._background = Background(1, "tidelog-local")
        self._metadata_guard = Lock()
        self._metadata_path = root / METADATA_FILE
        self._local_metadata: MetadataStore | None = None
        self._inherited_metadata: MetadataStore | None = None
        self._tier: Tier | None = None
        try:
            self._tier = None if self._info.store is None else _opened(open_tier, self._info)
            if not read_only:
                if self._tier is not None and self._was_local:
                    bring_layouts_along(self._files, root, self._log_settings, self._clock, self._tier)
                self._remember()
        except BaseException:
            if self._tier is not None:
                self._tier.close()
            self._release_lock()
            raise
        self._stagings = LocalStagings(
            root, self._metadata, self._clock, runs_in_background=isinstance(self._files.below, LocalFiles)
        )
        self._opener = TopicOpener(
            root,
            self._files,
            self._clock,
            self._log_settings,
            tier_settings or TierSettings(),
            self._tier,
            self._background,
            self._stagings,
        )
        if not read_only:
            stopping.closes_at_exit(self, has_others=True)

    @property
    def mode(self) -> str:
        """`local`, `shared_fs` or `object_store`."""
        if self._info.store is None:
            return "local"
        return "shared_fs" if self._info.store.startswith("file:") else "object_store"

    def _take(self, place: Place) -> DirectoryInfo:
        with explained("open", self.root):
            self._files.make_directories(self.root)
            self._lock = self._files.lock(self.root / _LOCK_FILE)
            try:
                known = read_info(self._files, self.root)
                self._was_local = known is not None and known.store is None
                info = introduce(self._files, self.root, self._clock, place)
                self._finish_deletions()
            except BaseException:
                self._lock.release()
                raise
        return info

    def _remember(self) -> None:
        """Writes down what this directory is, if that is news and, with a store, once that has answered."""
        with explained("open", self.root):
            if is_remembered(self._files, self.root, self._info):
                return
            if self._tier is not None:
                self._tier.check_reachable()
            remember(self._files, self.root, self._info)

    # Topics

    @overload
    def topic(
        self,
        name: str,
        *,
        partitions: None = None,
        first_offset: int = 0,
        reliable: bool | None = None,
        take_over: bool = False,
        **settings: Unpack[TierOptions],
    ) -> Topic: ...

    @overload
    def topic(
        self,
        name: str,
        *,
        partitions: int,
        first_offset: int = 0,
        reliable: bool | None = None,
        take_over: bool = False,
        **settings: Unpack[TierOptions],
    ) -> PartitionedTopic: ...

    def topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        first_offset: int = 0,
        reliable: bool | None = None,
        take_over: bool = False,
        **settings: Unpack[TierOptions],
    ) -> Topic | PartitionedTopic:
        """Returns the topic of this name, always the same object while the directory is open.

        It is created if absent, and then begins at `first_offset`; a directory that is open for reading only raises
        NotFoundError instead. `settings` are the topic's own, such as `retention_seconds=86400`: they are stored, and
        None resets one; `configure_topic` changes those of a topic that is open. A new topic with
        `reliable=False` is a `LiveTopic`, which stores nothing: its messages go to current readers and subscribers in
        this process, and it has no `ship` or `producer`. That is recorded too, and cannot be changed.

        With `partitions` it is a `PartitionedTopic`, whose messages are spread over so many logs by their keys. The
        number is recorded: opening the topic later needs no `partitions`, and a larger number adds some.

        Raises HeldError while another node has the topic open: `take_over=True` takes it over, and the messages that
        the node had accepted and not shipped stay on its disk for `tidelog topic rescue`.
        """
        parsed = parse_topic_name(name)
        check_first_offset(first_offset)
        divided = self._partitioned.get(parsed)
        if divided is not None and partitions in (None, divided.partitions) and not settings and not self._closed:
            return divided
        known = self._topics.get(parsed) if partitions in (None, 1) and divided is None else None
        is_known = known is not None and reliable in (None, known.is_reliable)
        if known is not None and is_known and not settings and not self._closed:
            # Without the guard, which somebody may hold who opens another topic in a store that is slow.
            return cast(Topic, known)
        with explained(f"topic {name}", self.root):
            check_partitions(partitions)
            if parsed.parent() is not None:
                number = self._partition_number(parsed, partitions)
                return self._open_whole(parsed, first_offset, reliable, take_over, settings, number)
            while True:
                divisions = self._divisions
                layout = self._settled_layout(parsed, partitions, first_offset, reliable, settings)
                if layout is not None:
                    return self._open_partitioned(parsed, layout, take_over)
                with self._opening_alone(parsed):
                    # Another thread may have created it with partitions since: then this one must not hide behind them.
                    if divisions == self._divisions:
                        return self._open_alone(parsed, first_offset, reliable, take_over, settings)

    topic_async = twin(topic)

    def _open_whole(
        self,
        parsed: TopicName,
        first_offset: int,
        reliable: bool | None,
        take_over: bool,
        settings: TierOptions,
        partition: int | None = None,
    ) -> Topic:
        """A topic without partitions, or one of those of another."""
        with self._opening_alone(parsed):
            return self._open_alone(parsed, first_offset, reliable, take_over, settings, partition)

    def _open_alone(
        self,
        parsed: TopicName,
        first_offset: int,
        reliable: bool | None,
        take_over: bool,
        settings: TierOptions,
        partition: int | None = None,
    ) -> Topic:
        name = str(parsed)
        opened = self._topics.get(parsed)
        if opened is not None and settings:
            raise InputError(f"the topic {name} is open already", hint="Change its settings with `configure_topic`")
        if opened is None:
            opened = self._open_topic(parsed, first_offset, dict(settings), reliable, take_over, partition)
            opened._use_subscriptions(self._cursors(parsed, opened), self._background, self._dead_letter_topic)
            self._topics[parsed] = opened
        if reliable not in (None, opened.is_reliable):
            raise InputError(
                f"the topic {name} has reliable={opened.is_reliable}, and that cannot be changed",
                hint="Choose another name, or delete it first",
            )
        return cast(Topic, opened)

    def _close_failed(self, name: TopicName) -> None:
        """Lets go of a log that has failed, if this one has: opening it again recovers what had reached the disk."""
        with self._opening_alone(name):
            topic = self._topics.get(name)
            if not isinstance(topic, Topic) or topic._owned is None or topic._owned.failure is None:
                return
            del self._topics[name]
            with contextlib.suppress(TidelogError):  # it was logged when it failed, and told to all who waited
                topic._close_storage()

    # Partitions

    def _settled_layout(
        self,
        name: TopicName,
        wanted: int | None,
        first_offset: int,
        reliable: bool | None,
        settings: TierOptions,
    ) -> PartitionLayout | None:
        """How the topic is divided, recorded if that is news; None for a topic without partitions."""
        known = self._opener.layout(name, opens=wanted in (None, 1))
        if known is not None and known.is_deleted and not self.read_only:
            self._delete_partitions(name, known, take_over=False)
            known = None
        count = 1 if known is None else known.count
        if wanted is None or wanted == count:
            if known is not None and (settings or first_offset or reliable is False):
                raise InputError(
                    f"{name} exists, with {count} partitions", hint="Change its settings with `configure_topic`"
                )
            return known
        if wanted < count:
            raise fewer_partitions(str(name), count)
        self._check_writable()
        if first_offset or reliable is False:
            raise InputError("a topic with partitions is reliable, and its offsets begin at 0")
        with self._guard:
            self._wait_while_opening(name)
            return self._divide(name, known, wanted, settings)

    def _divide(
        self, name: TopicName, known: PartitionLayout | None, wanted: int, settings: TierOptions
    ) -> PartitionLayout:
        is_new = False
        if known is None:
            taken = self._opener.log_exists_with(name)
            known = None if taken is None else self._opener.layout(name)  # another node may have made it meanwhile
            if taken is not None and (known is None or known.is_deleted):
                raise InputError(
                    f"{name} cannot have partitions: there is a topic {taken} already", hint="Take another name"
                )
        if known is None:
            known = PartitionLayout(count=1, has_grown=self._opener.exists(name))
            # Another node may own what it was so far: that is for nodes that agree by other means who serves what.
            if known.has_grown and not self._is_reliable(name):
                raise InputError(f"{name} has reliable=False, and cannot have partitions")
            is_new = not known.has_grown
        try:
            grown = known if known.count >= wanted else known.grown(wanted)
            divided = PartitionLayout(count=wanted) if is_new else grown
            layout = self._opener.set_layout(name, divided, settings, is_new=is_new)
        finally:
            self._divisions += 1  # after: who sees the new number finds what was recorded
        if (opened := self._partitioned.get(name)) is not None:
            opened._grown(layout)
        return layout

    def _is_reliable(self, name: TopicName) -> bool:
        """Opens the topic, unless another node may be its owner: HeldError if it is."""
        return self._opener.is_reliable(name) if self._shares_topics else self.topic(str(name)).is_reliable

    def partition_logs(self, name: str) -> list[str]:
        """The names of the logs that a topic consists of: its own, or those of its partitions."""
        parsed = parse_topic_name(name)
        layout = self._opener.layout(parsed)
        return [name] if layout is None else [str(parsed.log_of(number, layout)) for number in range(layout.count)]

    partition_logs_async = twin(partition_logs)

    def _partition_number(self, name: TopicName, wanted: int | None) -> int | None:
        """Which partition of another topic this is, by its name; None for a topic that only looks so, and is there."""
        found = name.parent()
        assert found is not None
        parent, number = found
        layout = self._opener.layout(parent)
        if layout is not None and number < layout.count and layout.log_name(parent.name, number) == name.name:
            return number
        if wanted not in (None, 1) or not self._opener.exists(name):
            raise TopicNameError(
                f"the name {name} is reserved for partition {number} of {parent}",
                hint=Hint(
                    f'Create that one first: log.topic("{parent}", partitions=...)',
                    command=f"Create that one first: `tidelog topic create {parent} --partitions N`",
                ),
            )
        return None

    def _open_partitioned(self, name: TopicName, layout: PartitionLayout, take_over: bool) -> PartitionedTopic:
        with self._guard:
            self._check_open()
            known = self._partitioned.get(name)
            if known is None:

                def read_layout() -> PartitionLayout:
                    recorded = self._opener.layout(name)
                    if recorded is None or recorded.is_deleted:
                        raise NotFoundError(f"the topic {name} was deleted", hint="Create it again, and use that one")
                    return recorded

                def open_partition(number: int, layout: PartitionLayout) -> Topic:
                    log_name = name.log_of(number, layout)
                    own: TierOptions = {} if self.read_only else self._opener.settings_of(name)  # type: ignore[assignment]
                    with explained(f"topic {name}, partition {number}", self.root):
                        found = self._topics.get(log_name)
                        given: TierOptions = {} if found is not None else own
                        return self._open_whole(log_name, 0, None, take_over, given, number)

                forget = lambda: self._forget_partitioned(name)  # noqa: E731
                known = self._partitioned[name] = PartitionedTopic(name, layout, read_layout, open_partition, forget)
                self._watch_partitions(name, known)
            known._grown(layout)
            return known

    def _watch_partitions(self, name: TopicName, topic: PartitionedTopic) -> None:
        """Partitions that nobody has used are opened when others have staged rows for them; with a store they may be
        another node's to open."""
        if self.read_only or self._tier is not None:
            return
        seconds = self._opener.ingest_check_seconds
        ends = self._stagings.watch_writes(name, seconds, lambda: self._open_waiting(name, topic))
        if ends is not None:
            self._watches[name] = ends

    def _open_waiting(self, name: TopicName, topic: PartitionedTopic) -> bool:
        """False while something else is done with the directory: closing it waits for what calls this."""
        if not self._guard.acquire(blocking=False):
            return False
        self._guard.release()
        for number in range(topic.partitions):
            log_name = name.log_of(number, topic._layout)
            if log_name not in self._topics and self._stagings.has_waiting(log_name):
                topic.partition(number)  # which ingests them
        return True

    def _forget_partitioned(self, name: TopicName) -> None:
        self._partitioned.pop(name, None)
        if (end := self._watches.pop(name, None)) is not None:
            end()

    def _delete_partitions(self, name: TopicName, layout: PartitionLayout, *, take_over: bool) -> None:
        """All partitions are owned before anything is deleted, and a mark tells the next opening to finish it."""
        names = [name.log_of(number, layout) for number in range(layout.count)]
        used = [log_name for log_name in names if self._opener.exists(log_name)]
        with self._guard:
            if (opened := self._partitioned.get(name)) is not None:
                opened._end(lambda: NotFoundError(f"the topic {name} was deleted", hint="Create it again"))
            if self._tier is not None:
                for log_name in used:
                    self._open_whole(log_name, 0, None, take_over, {})
            self._opener.set_layout(name, msgspec.structs.replace(layout, is_deleted=True), {})
            for log_name in sorted(used, key=lambda log_name: log_name == name):  # its own log last
                self._delete_whole(log_name, take_over=take_over)
            for log_name in names:
                self._delete_local_metadata(log_name)
                self._delete_directory(log_name)
            if self._tier is None:
                self._stagings.delete(name)
            self._opener.forget_layout(name)
            self._delete_directory(name)
            self._opener.forget_namespace(name)

    def open_topics(self, names: Sequence[str]) -> list[Topic]:
        """Opens several topics concurrently and returns them in order; faster than `topic` for each.

        If some cannot be opened, the others are open, and
        the first error is raised.
        """
        in_parallel(self.topic, list(dict.fromkeys(names)), _OPENED_AT_ONCE, "tidelog-open")
        return [self.topic(name) for name in names]

    open_topics_async = twin(open_topics)

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

    def _dead_letter_topic(self, name: str) -> DeadLetterTopic:
        """One that keeps them."""
        if self._open_letters is not None:
            return self._open_letters(name)
        return self.topic(name, reliable=True)

    def configure_topic(self, name: str, **settings: Unpack[TierOptions]) -> dict[str, object]:
        """Changes the topic's own settings and returns all of them; None resets one.

        They are stored (in the catalog, if there is a store). On a topic that is open here, retention, the times and
        bytes of shipping and the positions of new consumers change at once, the others when it is opened next.
        """
        parsed = parse_topic_name(name)
        with self._guard, explained(f"topic {name}", self.root):
            self._check_writable()
            self._wait_while_opening(parsed)
            self._require(parsed)
            layout = self._opener.layout(parsed)
            for number in range(0 if layout is None else layout.count):
                log_name = parsed.log_of(number, layout)  # type: ignore[arg-type]
                if log_name != parsed and self._opener.exists(log_name):
                    self._configure(log_name, settings)
            return self._configure(parsed, settings)

    def _configure(self, name: TopicName, settings: TierOptions) -> dict[str, object]:
        own = self._opener.configure(name, settings)
        opened = self._topics.get(name)
        if isinstance(opened, Topic) and opened._is_open:
            self._opener.reconfigure(opened, own)
        return own

    configure_topic_async = twin(configure_topic)

    def _open_topic(
        self,
        name: TopicName,
        first_offset: int,
        settings: dict[str, object],
        reliable: bool | None,
        take_over: bool,
        partition: int | None,
    ) -> Topic | LiveTopic:
        if self.read_only:
            if settings or first_offset:
                self._check_writable()
            return self._opener.look(name, partition)
        return self._opener.open(
            name, self._seal, settings, first_offset, reliable, take_over=take_over, partition=partition or 0
        )

    def _cursors(self, name: TopicName, topic: BaseTopic) -> CursorStore:
        """Where the positions of a topic's subscriptions are."""
        local = self._local_cursors(name)
        if self._tier is None:
            if topic.is_reliable and not self.read_only:
                local.clip(topic.next_offset)
            return local
        cursors = CatalogCursors(self._tier.catalog(name.namespace, name.name), topic._tiered)
        if topic._tiered is not None and self._info.metadata != INSIDE:
            local.bring_along(cursors)
        return cursors

    def _local_cursors(self, name: TopicName) -> LocalCursors:
        return LocalCursors(self._metadata, TopicKeys(name.namespace, name.name), self._clock)

    def _group_cursors(self, logs: Sequence[TopicName]) -> list[dict[str, Cursor | DataError]]:
        """The positions of all consumer groups in each of these logs, which need not be open."""
        if self._tier is None:
            return [self._local_cursors(log_name).group_cursors() for log_name in logs]
        return self._tier.catalogs.group_cursors(logs)

    def _group_cursor_write(self, log_name: TopicName, name: str, cursor: Cursor | None) -> Put | Delete:
        """What stores the position of a consumer group in a log of the store, owned by any node, or deletes it."""
        assert self._tier is not None, "groups are shared by nodes with a store"
        key = self._tier.catalog(log_name.namespace, log_name.name).keys.subscription(name)
        if cursor is None:
            return Delete(key)
        return Put(key, encode_json(msgspec.structs.replace(cursor, moved_us=self._clock.now_us())))

    def _metadata(self, make: bool) -> MetadataStore | None:
        """The metadata file of a directory without a store, for subscriptions and staged commits of other processes;
        the first subscription creates it.
        """
        with self._metadata_guard:
            self._check_open()
            if self._local_metadata is None and (make or self._files.exists(self._metadata_path)):
                is_local = isinstance(self._files.below, LocalFiles)
                self._local_metadata = SqliteMetadataStore(self._metadata_path) if is_local else MemoryMetadataStore()
            return self._local_metadata

    def _shared_metadata(self) -> tuple[MetadataStore, str]:
        """For documents of the whole installation, such as the transactions of Kafka's producers: the metadata store,
        and the root of the keys there. Without a store it is the file of this directory."""
        if self._tier is not None:
            return self._tier.shared_metadata()
        metadata = self._metadata(True)
        assert metadata is not None
        return metadata, DEFAULT_ROOT

    def has_topic(self, name: str) -> bool:
        """Whether the topic exists."""
        self._check_open()
        return self._opener.exists(parse_topic_name(name))

    has_topic_async = twin(has_topic)

    def topics(self) -> list[str]:
        """The names of all topics, sorted: those on this disk and those in the catalog."""
        self._check_open()
        return self._opener.views.names()

    topics_async = twin(topics)

    def _topic_directory(self, name: str) -> Path:
        """Where the files of an existing topic are, or would be: all of it may be in the store."""
        parsed = parse_topic_name(name)
        self._require(parsed)
        return parsed.directory(self.root)

    def delete_topic(self, name: str, *, take_over: bool = False) -> None:
        """Removes a topic and everything in it, for good, from the disk and from the store. Its open readers end.

        Topics for dead letters of its subscriptions go with it while they are empty: letters that nobody has looked at
        are kept. HeldError while another node has it open, unless `take_over`.
        """
        parsed = parse_topic_name(name)
        with self._guard, explained(f"delete topic {name}", self.root):
            self._check_writable()
            self._wait_while_opening(parsed)
            self._require(parsed)
            layout = self._opener.layout(parsed)
            parent = parsed.parent()
            letters = self._dead_letter_topics(parsed, layout)
            if layout is not None:
                self._delete_partitions(parsed, layout, take_over=take_over)
            elif parent is not None and is_partition_of(parent, {parent[0]: self._opener.layout(parent[0])}):
                raise InputError(f"{name} is a partition of {parent[0]}", hint=f"Delete {parent[0]}, with all of them")
            else:
                self._delete_whole(parsed, take_over=take_over)
            for one in letters:
                with contextlib.suppress(TidelogError):  # it stays, as one with letters does
                    self._delete_if_empty(one)

    delete_topic_async = twin(delete_topic)

    def _dead_letter_topics(self, name: TopicName, layout: PartitionLayout | None) -> list[TopicName]:
        """Those of a topic's own subscriptions, which give them their names; one that may be another topic's is left
        out, and one that only looks like it is somebody's own."""
        names = [one for one in map(parse_topic_name, self._opener.views.names()) if one.namespace == name.namespace]
        logs = (
            {name.name} | {name.log_of(number, layout).name for number in range(layout.count)}
            if layout
            else {name.name}
        )
        others = [one.name for one in names if one.name not in logs]
        candidates = [one for one in names if any(is_for_letters(one.name, log) for log in logs)]
        own = {letters for log in logs for letters in self._letters_of(TopicName(name.namespace, log))}
        return [
            one
            for one in candidates
            if str(one) in own and not any(is_for_letters(one.name, other) for other in others)
        ]

    def _letters_of(self, log: TopicName) -> Iterator[str]:
        """The topics of dead letters that the subscriptions of a log have, unless they name another."""
        known = self._local_cursors(log) if self._tier is None else self._tier.catalog(log.namespace, log.name)
        subscriptions = known.names() if isinstance(known, LocalCursors) else known.subscriptions()
        return (dead_letter_name(str(log), one, None) for one in subscriptions)

    def _delete_if_empty(self, name: TopicName) -> None:
        topic: Topic | PartitionedTopic = self.topic(str(name))
        if isinstance(topic, Topic) and topic.next_offset == 0:
            self._delete_whole(name, take_over=False)

    def _delete_whole(self, name: TopicName, *, take_over: bool) -> None:
        """A topic without partitions, or one of those of another."""
        if self._tier is not None:
            self._open_whole(name, 0, None, take_over, {})  # what is in the store is only its owner's to delete
        self._delete_storage(name)
        self._delete_local_metadata(name)
        self._delete_directory(name)
        self._opener.forget_namespace(name)

    def _delete_storage(self, name: TopicName) -> None:
        with self._group_offsets.writing:  # what comes after it finds no topic to write to
            topic = self._topics.pop(name, None)
        if topic is None:
            return
        try:
            topic._delete_storage()
        except TidelogError as error:
            # Opening it again would take it back from its owner, or from itself, which no caller asked for.
            if isinstance(error, FencedError) or topic._is_open:
                self._topics[name] = topic
            raise

    def _delete_local_metadata(self, name: TopicName) -> None:
        """A topic that is created again under this name has no subscriptions and no staged commits."""
        if self._tier is None:
            self._stagings.delete(name)
            self._local_cursors(name).delete_all()

    def _seal(self, topic: Topic) -> None:
        """The topic is moving to another owner; a later request opens it again."""
        name = parse_topic_name(topic.name)
        with self._opening_alone(name):  # others may be opened and sealed meanwhile
            if self._topics.get(name) is not topic:
                # One that was opened since has the same name, and is not what this caller means.
                raise ClosedError(f"the topic {name} is closed", path=self.root, hint="Ask for it again")
            topic._seal_storage()
            self._topics.pop(name, None)

    def _hand_over(self, topic: Topic) -> None:
        """Seals a log so that another node can open it; one that another node has taken over is closed as it is."""
        try:
            self._seal(topic)
        except FencedError:
            with self._opening_alone(topic._name):
                if self._topics.get(topic._name) is topic:
                    del self._topics[topic._name]
            with contextlib.suppress(TidelogError):
                topic._close_storage()

    def _give_back_claim(self, name: TopicName, number: int) -> None:
        """Of a partition that is not served here: the answer to a claim may have been lost, or its log was opened, and
        what its service needs besides was not."""
        layout = self._opener.layout(name)
        log_name = name if layout is None else name.log_of(number, layout)
        half_open = self._topics.get(log_name)
        if isinstance(half_open, Topic):
            self._hand_over(half_open)
            return
        with self._opening_alone(log_name):
            if self._tier is not None and log_name not in self._topics:
                give_back_unknown_claim(self._tier.catalog(*log_name), self._tier.lease)

    def _require(self, name: TopicName) -> None:
        if not self._opener.exists(name):
            raise NotFoundError(f"there is no topic {name}", path=self.root, hint="`tidelog topic list` shows them")

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
        """Flushes and closes every topic and releases the directory. Idempotent.

        The first error is raised once all is closed: FencedError when acknowledgements are lost because another node
        owns a topic now.
        """
        with self._guard:
            self._opening_changed.wait_for(lambda: not self._opening)
            if self._closed:
                return
            # All of them before any topic ends: one may have something to give up, and its letters go to another topic.
            lost = [error for topic in self._topics.values() for error in topic._close_subscriptions()]
            closed = in_parallel(_close_quietly, list(self._topics.values()), _CLOSED_AT_ONCE, "tidelog-close")
            failed = [error for error in closed if error is not None]
            self._background.close()
            self._stagings.close()
            if self._local_metadata is not None:
                self._local_metadata.close()
            if self._tier is not None:
                self._tier.close()
            self._release_lock()
            self._closed = True  # last: who was interrupted in here can close again
            stopping.no_longer_open(self)
        for error in (*failed, *lost):
            raise error

    close_async = twin(close)

    def _abandon(self) -> None:
        """In a forked child: the parent keeps running, and this copy releases the lock it inherited."""
        # Other threads of the parent may have held them.
        self._guard, self._metadata_guard = RLock(), Lock()
        self._group_offsets = GroupOffsets(self)
        self._opening_changed, self._opening = Condition(self._guard), set()
        self._closed = True
        # SQLite must not be used, nor closed, in a child: the parent's positions are not this copy's to move.
        self._inherited_metadata, self._local_metadata = self._local_metadata, None
        if self._lock is not None:
            self._lock.abandon()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()

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


def why_not_ours(log: LogDirectory, name: str) -> str | None:
    """Why opening a topic here would take it from another node, which it fences; None if it would not."""
    parsed = parse_topic_name(name)
    catalog = None if log._tier is None else log._tier.catalog(parsed.namespace, parsed.name)
    found = None if catalog is None else catalog.owner()
    if catalog is None or found is None:
        return None
    owner = found[0]
    if catalog.sealed_by(owner) is not None:
        return f"{name} is sealed for its next owner"
    return None if owner.node == log._info.node else f"{owner.who} owns {name}, with epoch {owner.epoch}"


def fewer_partitions(topic: str, count: int) -> InputError:
    """For a number of partitions below that of a topic that exists."""
    return InputError(f"{topic} has {count} partitions, and cannot have fewer", hint="Take another name")


def check_partitions(count: object) -> None:
    """InputError when a topic cannot have so many partitions."""
    is_number = isinstance(count, int) and not isinstance(count, bool)
    if count is not None and not (is_number and 1 <= count <= MAX_PARTITIONS):  # type: ignore[operator]
        raise InputError(f"partitions must be 1 to {MAX_PARTITIONS:,}, not {count!r}")


def _close_quietly(topic: BaseTopic) -> TidelogError | None:
    try:
        topic._close_storage()
    except TidelogError as error:
        return error
    return None

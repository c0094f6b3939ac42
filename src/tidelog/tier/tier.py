"""The cold side of a log directory: one store, one metadata store, and the threads that all its topics share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tidelog.clock import Clock
from tidelog.errors import TidelogError
from tidelog.files import Files
from tidelog.log import Log, LogSettings
from tidelog.log.bound_files import bound
from tidelog.log.groups import GroupOf
from tidelog.log.readable import ReadableLog
from tidelog.tier.background import Background
from tidelog.tier.catalog import Catalog
from tidelog.tier.daemon_pool import DaemonPool
from tidelog.tier.history import History
from tidelog.tier.history_counters import HistoryCounters
from tidelog.tier.intake_ledger import OwnedLedger
from tidelog.tier.intake_rows import CheckRows, Staging
from tidelog.tier.intake_taker import IntakeTaker
from tidelog.tier.joined import JoinedLog
from tidelog.tier.key_watch import KeyWatch
from tidelog.tier.keys import DEFAULT_ROOT, TopicKeys, parse_topic_key, topics_prefix
from tidelog.tier.metadata.measured import MeasuredMetadata
from tidelog.tier.metadata.remembered import RememberedMetadata
from tidelog.tier.metadata.store import MetadataStore, end_of
from tidelog.tier.node_lease import DEFAULT_LEASE_SECONDS, NodeLease
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.placed_rows import PlacedRows
from tidelog.tier.pruner import Pruner
from tidelog.tier.shipper import Shipper
from tidelog.tier.takeover import Takeover
from tidelog.tier.tier_settings import TierSettings
from tidelog.tier.tiered_log import TieredLog

# An upload keeps several parts in flight by itself; what this bounds is how many topics are shipped at once.
_BACKGROUND_THREADS = 4
_FETCHING_THREADS = 8
_ASKING_THREADS = 2


class Tier:
    """An open store with its metadata. Topics are opened through it; closing it ends what runs in the background."""

    def __init__(
        self,
        objects: ObjectStore,
        metadata: MetadataStore,
        *,
        files: Files,
        clock: Clock,
        node: str,
        directory: Path = Path("/"),
        root: str = DEFAULT_ROOT,
        runs_in_background: bool = True,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        renews_lease: bool | None = None,
    ) -> None:
        """`directory` is that of the node, whose lock the caller holds. `renews_lease`: as `runs_in_background`."""
        self.objects = objects
        self.metadata = MeasuredMetadata(metadata)
        self.node = node
        self._files = bound(files)
        self._clock = clock
        self._root = root
        self._runs_in_background = runs_in_background
        self._background = Background(_BACKGROUND_THREADS, "tidelog-tier")
        self.lease = NodeLease(
            *(self.metadata, clock, node, directory),
            lease_seconds=lease_seconds,
            root=root,
            renews_itself=runs_in_background if renews_lease is None else renews_lease,
            ending=self._background,
        )
        """What tells other nodes that this one lives."""
        self._questions = Background(_ASKING_THREADS, "tidelog-owner")
        self._watch = KeyWatch(lambda: self.metadata, self._questions)
        self._fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-fetch")

    def check_reachable(self) -> None:
        """Asks both stores something small; an error of theirs when they are not what was meant."""
        next(iter(self.objects.list("storage/")), None)
        self.metadata.get(f"{self._root}/storage/epoch-floor")

    def catalog(self, namespace: str, name: str) -> Catalog:
        """What is known about a topic."""
        return Catalog(self.metadata, TopicKeys(namespace, name, self._root))

    def opening_catalog(self, namespace: str, name: str) -> Catalog:
        """The same for whoever is about to open the topic: what opening asks for is read at once, and remembered."""
        keys = TopicKeys(namespace, name, self._root)
        asked = (
            *(keys.owner, keys.start, keys.state, keys.settings),
            *(keys.intake, keys.current, keys.epoch_floor),
        )
        return Catalog(RememberedMetadata(self.metadata, asked), keys)

    def topics(self) -> Iterator[tuple[str, str]]:
        """All topics in the metadata store, as (namespace, name). Costs one small request a topic."""
        prefix = topics_prefix(self._root)
        start = prefix
        while keys := self.metadata.keys(prefix, start=start, limit=1):
            found = parse_topic_key(keys[0], self._root)
            if found is None:
                start = keys[0] + "0"
                continue
            topic = TopicKeys(found.namespace, found.topic, self._root)
            if self._makes_topic(topic, keys[0]):
                yield found.namespace, found.topic
            start = end_of(topic.metadata_prefix)

    def _makes_topic(self, topic: TopicKeys, first: str) -> bool:
        """What was handed over to a name that nobody has opened yet, or is to be replayed into it, makes no topic."""
        for prefix, behind in (
            (topic.intake, topic.intake + "0"),
            (topic.replays_prefix, end_of(topic.replays_prefix)),
        ):
            if first.startswith(prefix):
                others = self.metadata.keys(topic.metadata_prefix, start=behind, limit=1)
                if not others:
                    return False
                first = others[0]
        return True

    def open_log(
        self,
        directory: Path,
        namespace: str,
        name: str,
        log_settings: LogSettings,
        settings: TierSettings,
        *,
        time_field: int | None,
        first_offset: int = 0,
        group_of: GroupOf | None = None,
        check_rows: CheckRows | None = None,
        take_over: bool = False,
        is_covered: bool = False,
        catalog: Catalog | None = None,
    ) -> TieredLog:
        """Claims a topic and opens it for writing. The caller holds the lock of the directory above.

        HeldError while another node has it open, unless `take_over`. `is_covered`: the lock covers the topic's
        directory too, which is there and durable. `catalog` is an `opening_catalog` that has been used already.
        """
        catalog = catalog or self.opening_catalog(namespace, name)
        if not is_covered:
            self._files.make_directories(directory)
        takeover = Takeover(self._files, directory, catalog, self.objects, self._clock, self.lease)
        taken = takeover.take(first_offset, take_over=take_over)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release, taken.catalog)
            log = Log.open(
                directory,
                log_settings,
                files=self._files,
                clock=self._clock,
                time_field=time_field,
                first_offset=taken.next_offset,
                group_of=group_of,
                kept_elsewhere=lambda first, stop: catalog.covers(max(first, catalog.start_offset()), stop),
                is_covered=is_covered,
            )
            undo.callback(log.close)
            taken.catalog.clip_cursors(log.next_offset)
            tiered = self._assemble(
                *(log, taken.catalog, taken.next_offset, log_settings, settings, time_field, group_of, check_rows)
            )
            undo.pop_all()
            return tiered

    def _release(self, owned: OwnedCatalog) -> None:
        """What was claimed, and could not be opened then, does not stay closed to others while this node lives."""
        with contextlib.suppress(TidelogError):
            owned.ownership.release()

    def _assemble(
        self,
        log: Log,
        owned: OwnedCatalog,
        next_offset: int,
        log_settings: LogSettings,
        settings: TierSettings,
        time_field: int | None,
        group_of: GroupOf | None,
        check_rows: CheckRows | None,
    ) -> TieredLog:
        shipper = Shipper(
            *(log, owned, self.objects, settings, self._clock, time_field, next_offset), group_of=group_of
        )
        pruner = Pruner(log, owned, self.objects, settings, self._clock, lambda: shipper.shipped_offset)
        history = self._history(owned.catalog)
        intake = IntakeTaker(
            *(log, OwnedLedger(owned), owned.catalog.keys),
            *(lambda: Staging(self.objects, history.fetcher), lambda: shipper.shipped_offset, self._clock),
            max_message_bytes=log_settings.max_message_bytes,
            check_seconds=settings.intake_check_seconds,
            looks_are_paid=not self.metadata.supports_multi_key,
            placed_rows=PlacedRows(self._files, log.directory),
            check_rows=check_rows,
        )
        tiered = TieredLog(log, owned, self.objects, history, shipper, pruner, intake, settings, time_field)
        intake.settle()
        if isinstance(owned.catalog.metadata, RememberedMetadata):
            owned.catalog.metadata.forget_for_good()
        if self._runs_in_background:
            tiered.start_tasks(self._background, self._questions, self._watch)
        return tiered

    def view(self, namespace: str, name: str, hot: ReadableLog | None, time_field: int | None) -> JoinedLog:
        """A topic for reading only; `hot` is what this disk has of it."""
        return JoinedLog(hot, self._history(self.catalog(namespace, name)), time_field=time_field)

    def _history(self, catalog: Catalog) -> History:
        return History(catalog, self.objects, self._fetchers, counters=HistoryCounters())

    def close(self) -> None:
        """Topics are closed before. Closing twice is fine."""
        self._background.close()
        self._questions.close()
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        try:
            self.lease.release()
        finally:
            self.metadata.close()

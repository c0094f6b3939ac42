"""Topics for reading only: those of a directory, of a catalog, or of both. Nothing is opened for writing or claimed.

Invariants
- A topic exists if its `topic.json` exists, or WAL files that lost theirs, or an owner in the catalog.
- Local files are read only while they are the end of the topic: if another node has written since, they are not.
- Local messages can be read while the stores do not answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog, Catalogs, PartitionLayout
from tidelog.cold.ownership import read_local_claim
from tidelog.cold.tiered_reader import HistoryOf, TieredView
from tidelog.errors import NotFoundError, RetryError
from tidelog.files import Files, LocalFiles
from tidelog.log.binding import BoundFiles
from tidelog.log.reader import ReadableLog
from tidelog.log.settings import LogSettings
from tidelog.log.view import LogView
from tidelog.topics.message import TIMESTAMP_FIELD, group_of
from tidelog.topics.names import (
    TopicInfo,
    TopicName,
    is_name_part,
    is_topic_directory,
    parse_topic_name,
    read_topic_info,
)

_logger = logging.getLogger("tidelog.topics")


class TopicViews:
    """The topics of a directory, and of the catalogs of its store if there is one; `history_of` reads their objects.

    Without a directory (None) they are what the store has.
    """

    def __init__(
        self,
        root: Path | None,
        settings: LogSettings,
        files: Files | None,
        clock: Clock,
        catalogs: Catalogs | None,
        history_of: HistoryOf | None,
    ) -> None:
        self._root = root
        self._settings = settings
        self._files = files or BoundFiles() if root is not None else LocalFiles()
        self._clock = clock
        self._catalogs = catalogs
        self._history_of = history_of

    def names(self) -> list[str]:
        """All topics, sorted. Partitions are not topics of their own."""
        found = set() if self._root is None else {str(name) for name in self._local(self._root)}
        for topic in () if self._catalogs is None else self._catalogs.topics():
            if all(map(is_name_part, topic)):
                found.add(str(TopicName(*topic)))
        parents = {name: parse_topic_name(name).parent() for name in found}
        layouts = {parent: self.layout(parent) for parent in {parent for parent, _ in filter(None, parents.values())}}
        return sorted(name for name in found if not is_partition_of(parents[name], layouts))

    def local(self) -> list[TopicName]:
        """The topics on this disk, partitions among them."""
        return [] if self._root is None else self._local(self._root)

    def layout(self, name: TopicName, catalog: Catalog | None = None) -> PartitionLayout | None:
        """How a topic is divided into partitions; None when it is not, or does not exist."""
        info = None
        if self._catalogs is not None:
            try:
                found = (catalog or self._catalogs.of(*name)).partitions_document().read()
            except RetryError:
                info = self._info(name)
                if info is None:
                    raise  # what is on this disk can be looked at without the store
            else:
                return None if found is None else found.value
        info = info or self._info(name)
        return None if info is None else info.partitions

    def _info(self, name: TopicName) -> TopicInfo | None:
        return None if self._root is None else read_topic_info(self._files, name.directory(self._root))

    def _local(self, root: Path) -> list[TopicName]:
        if not self._files.is_directory(root):
            return []
        names = [
            TopicName(namespace, name) for namespace in self._folders(root) for name in self._folders(root / namespace)
        ]
        return [name for name in names if is_topic_directory(self._files, name.directory(root))]

    def _folders(self, directory: Path) -> list[str]:
        names = self._files.list(directory)
        return [name for name in names if is_name_part(name) and self._files.is_directory(directory / name)]

    def exists(self, name: TopicName) -> bool:
        """Whether there is such a topic, on this disk or in the catalog."""
        if self._has_files(name) or self._catalogs is None:
            return self._has_files(name)
        catalog = self._catalogs.of(*name)
        return catalog.owner() is not None or catalog.partitions_document().read() is not None

    def _has_files(self, name: TopicName) -> bool:
        return self._root is not None and is_topic_directory(self._files, name.directory(self._root))

    def look(self, name: TopicName, *, is_partition: bool = False) -> TieredView | LogView | None:
        """Where its messages are read from; NotFoundError when there is no such topic, None for one that keeps none.

        A partition is there, and empty, before anybody has used it.
        """
        directory, info = None if self._root is None else name.directory(self._root), self._info(name)
        if info is not None and not info.reliable:
            return None
        has_files = self._has_files(name)
        if not is_partition and not has_files and not self.exists(name):
            raise NotFoundError(f"there is no topic {name}", path=self._root, hint="`tidelog topic list` shows them")
        if self._catalogs is None or self._history_of is None:
            assert directory is not None, "what is in no catalog is on a disk"
            return self._view(directory, refuses_missing_start=True)
        if directory is None or not has_files:
            return self._tiered(name, None)
        try:
            hot = self._tail(directory, self._catalogs.of(*name))
        except RetryError as error:
            _logger.warning("%s: only what is on this disk can be read now: %s", directory, error.message)
            return self._view(directory)
        return self._tiered(name, hot)

    def _tiered(self, name: TopicName, hot: ReadableLog | None) -> TieredView:
        assert self._catalogs is not None and self._history_of is not None
        return TieredView(hot, self._history_of, self._catalogs.of(*name), time_field=TIMESTAMP_FIELD)

    def stored(self, name: TopicName, hot: ReadableLog | None = None) -> TieredView:
        """What the store has of a topic, and what is at its `hot` end."""
        return self._tiered(name, hot)

    def _tail(self, directory: Path, catalog: Catalog) -> LogView | None:
        """The files here, unless another node has written since: then they are not the end of the topic any more."""
        owner, next_offset = catalog.owner(), catalog.next_offset()
        local = read_local_claim(self._files, directory)
        if owner is not None and (local is None or not local.knows(owner[0].incarnation)):
            return None
        return self._view(directory, next_offset)

    def _view(self, directory: Path, first_offset: int = 0, *, refuses_missing_start: bool = False) -> LogView:
        return LogView(
            directory,
            self._settings,
            files=self._files,
            clock=self._clock,
            time_field=TIMESTAMP_FIELD,
            first_offset=first_offset,
            group_of=group_of,
            refuses_missing_start=refuses_missing_start,
        )


def is_partition_of(parent: tuple[TopicName, int] | None, layouts: Mapping[TopicName, PartitionLayout | None]) -> bool:
    """Whether the topic that a name would be a partition of has that partition."""
    layout = None if parent is None else layouts[parent[0]]
    return parent is not None and layout is not None and parent[1] < layout.count

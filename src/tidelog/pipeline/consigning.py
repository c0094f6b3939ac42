"""The driver's half of a write: parts that tasks have staged are committed, and brought into their topics.

Invariants
- A commit that is not known to have been done is made again, under the same name: it is done once.
- What was committed is the topic's. If nobody takes it in for a while, the error says that it must not be
  written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tidelog.errors import InputError, NotTakenInError, RetryError
from tidelog.files import LocalFiles, explained
from tidelog.pipeline.hand_over import take_in
from tidelog.pipeline.part import ColdPlace
from tidelog.pipeline.partition_writer import StagingPlace
from tidelog.pipeline.root import Root
from tidelog.pipeline.sink_options import SinkOptions
from tidelog.tier.intake_area import IntakeArea
from tidelog.tier.intake_part import StagedPart
from tidelog.tier.keys import DEFAULT_ROOT, TopicKeys
from tidelog.tier.metadata.open import open_metadata_store
from tidelog.tier.stores import open_store
from tidelog.topics.directory_info import INSIDE, metadata_url, read_info
from tidelog.topics.local_intake import staging_url
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.topics.topic_info import read_topic_info


def staging_place(options: SinkOptions) -> StagingPlace:
    """Where the tasks of a write stage their rows."""
    if options.topic is not None:
        _refuse_live(options.root, parse_topic_name(options.topic))
    limit = options.root.load().log.max_message_bytes
    return StagingPlace(write_place(options.root), options.topic, limit)


def write_place(root: Root) -> ColdPlace:
    """Where rows for the topics of a root are handed over."""
    settings, directory = root.load(), root.directory
    if directory is None:
        assert root.metadata is not None, "a store has a catalog somewhere"
        return ColdPlace(root.location, settings.object_store, root.metadata, settings.metadata_root)
    known = read_info(LocalFiles(), directory) if directory.is_dir() else None
    if known is None or known.store is None or known.metadata is None:
        local = type(settings.object_store)()
        return ColdPlace(staging_url(directory), local, metadata_url(directory, INSIDE), DEFAULT_ROOT)
    url = metadata_url(directory, known.metadata)
    return ColdPlace(known.store, settings.object_store, url, settings.metadata_root)


class HandOver:
    """One write, by its name."""

    def __init__(self, root: Root, app: str, version: int, *, is_once: bool = False) -> None:
        self._root = root
        self._app = app
        self._version = version
        self._is_once = is_once

    def commit(self, parts: Mapping[str, Sequence[StagedPart]], wait_seconds: float) -> None:
        """All rows of each topic, and then they are brought into it."""
        for topic in parts:
            _refuse_live(self._root, parse_topic_name(topic))  # one that cannot be is found before any is committed
        was_committed = {topic for topic, staged in sorted(parts.items()) if not self._commit(topic, staged)}
        for topic, staged in sorted(parts.items()):
            with _committed_already(topic), self._area(topic) as area:
                take_in(self._root, parse_topic_name(topic), area, self._app, self._version, wait_seconds)
                if topic in was_committed:
                    area.drop(self._app, self._version, staged)

    def _commit(self, topic: str, staged: Sequence[StagedPart]) -> bool:
        """Whether it was these parts that were committed, and not others before them."""
        with self._area(topic) as area:
            return area.commit(self._app, self._version, staged, is_once=self._is_once) == "committed"

    def discard(self, parts: Mapping[str, Sequence[StagedPart]], topic: str | None) -> None:
        """Removes what was staged, unless it was committed.

        Under a name that others may write under too, only these parts: what failed tasks have left goes when the write
        is made again. Else everything, since Spark does not say what failed tasks have staged.
        """
        for name in sorted({*parts, *([] if topic is None else [topic])}):
            keys = None if self._is_once else [part.key for part in parts.get(name, ())]
            with self._area(name) as area:
                area.discard(self._app, self._version, keys)

    @contextmanager
    def _area(self, topic: str) -> Iterator[IntakeArea]:
        place = write_place(self._root)
        objects = open_store(place.store_url, place.store_settings)
        metadata = open_metadata_store(place.metadata_url, objects)
        try:
            yield IntakeArea(objects, metadata, _keys(parse_topic_name(topic), place))
        finally:
            metadata.close()


@contextmanager
def _committed_already(topic: str) -> Iterator[None]:
    """From here on no error may sound as if the rows were to be written again."""
    try:
        yield
    except NotTakenInError:
        raise
    except RetryError as error:
        raise NotTakenInError(
            f"the rows are handed over to {topic}, and it is not known whether they are taken in: {error.message}",
            operation="write",
            hint="They come in when the owner of the topic runs. Do not write them again",
        ) from error


def _refuse_live(root: Root, name: TopicName) -> None:
    """What is handed over to a topic that keeps nothing would wait for ever."""
    if root.directory is None:
        return
    with explained("write", root.directory):
        info = read_topic_info(LocalFiles(), name.directory(root.directory))
    if info is not None and not info.reliable:
        raise InputError(f"{name} has reliable=False: it keeps nothing, and nothing can be handed over to it")


def _keys(name: TopicName, place: ColdPlace) -> TopicKeys:
    return TopicKeys(name.namespace, name.name, place.metadata_root)

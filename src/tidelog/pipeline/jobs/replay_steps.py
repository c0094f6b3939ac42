"""How far a replay into a topic is: which step is under way, written down before anything of it is.

    {"source": "...", "first": 2000, "end": 3000, "is_done": false}

A step is a range of the source: offsets of a topic, or numbers of files. Its rows are one consignment of the target,
whose version is the end of the step.

Invariants
- A step is settled by one compare-and-swap before its rows are written, and the next one only when it is done. So all
  who run the same replay, one after another or at once, write the same steps, and each consignment comes in once.
- A replay has a name, and belongs to one source: what was begun with another one is not gone on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from tidelog.errors import ConflictError, NotFoundError, RetryError
from tidelog.pipeline.consigning import write_place
from tidelog.pipeline.hand_over import take_in
from tidelog.pipeline.root import Root
from tidelog.tier import owner as documents
from tidelog.tier.intake_area import IntakeArea
from tidelog.tier.intake_document import IntakeStatus
from tidelog.tier.keys import TopicKeys
from tidelog.tier.metadata.open import open_metadata_store
from tidelog.tier.metadata.store import Check, MetadataStore, Put
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.stores import open_store
from tidelog.topics.names import TopicName, parse_topic_name

_ATTEMPTS = 50
_WAIT_SECONDS = 60.0


class ReplayState(msgspec.Struct, frozen=True, kw_only=True):
    """The step that was settled last, and whether its rows are known to be in the topic."""

    source: str
    first: int
    end: int
    is_done: bool


class Step(NamedTuple):
    """A range of the source whose rows are written as one."""

    first: int
    end: int


class ReplaySteps:
    """The steps of one replay, as its target has them written down."""

    def __init__(
        self, root: Root, topic: TopicName, metadata: MetadataStore, objects: ObjectStore, name: str, source: str
    ) -> None:
        self.app = f"replay-{name}"
        keys = TopicKeys(topic.namespace, topic.name, write_place(root).metadata_root)
        self._root = root
        self._topic = topic
        self._metadata = metadata
        self._key = keys.replay(name)
        self._area = IntakeArea(objects, metadata, keys)
        self._name = name
        self._source = source

    def all(self, start: int, end_of: Callable[[int], int]) -> Iterator[Step]:
        """Step after step, from where the replay was left; `end_of` says where a step ends that begins somewhere.

        A step counts as done when the next one is asked for. It ends when a step would be empty.
        """
        while (step := self._settled(start, end_of)) is not None:
            yield step
            self._finish(step)

    def status(self, step: Step) -> IntakeStatus:
        """What became of the rows of a step."""
        return self._area.status(self.app, step.end)

    def wait(self, step: Step) -> None:
        """Returns once the rows of a step that was handed over are in the topic; NotTakenInError after a while."""
        take_in(self._root, self._topic, self._area, self.app, step.end, _WAIT_SECONDS)

    def _settled(self, start: int, end_of: Callable[[int], int]) -> Step | None:
        for _ in range(_ATTEMPTS):
            state, version = self._load()
            if state is not None and not state.is_done:
                return Step(state.first, state.end)
            first = start if state is None else max(start, state.end)
            end = end_of(first)
            if end <= first:
                return None
            self._store(ReplayState(source=self._source, first=first, end=end, is_done=False), version)
        raise RetryError("others change how far this replay is, again and again", hint="Let them end")

    def _finish(self, step: Step) -> None:
        for _ in range(_ATTEMPTS):
            state, version = self._load()
            if state is None or state.is_done or Step(state.first, state.end) != step:
                return  # somebody else has found it done as well, and is further
            if self._store(msgspec.structs.replace(state, is_done=True), version):
                return
        raise RetryError("others change how far this replay is, again and again", hint="Let them end")

    def _load(self) -> tuple[ReplayState | None, str | None]:
        entry = self._metadata.get(self._key)
        if entry is None:
            return None, None
        state = documents.decode(entry.value, self._key, ReplayState)
        if state.source != self._source:
            raise ConflictError(
                f"the replay {self._name} was begun with another source: {state.source}, not {self._source}",
                operation="replay",
                hint="Give this one a name of its own (--name); what both have in common is written again then",
            )
        return state, entry.version

    def _store(self, state: ReplayState, version: str | None) -> bool:
        try:
            self._metadata.commit([Check(self._key, version)], [Put(self._key, documents.encode(state))])
        except ConflictError:
            return False
        return True


@contextmanager
def open_steps(root: Root, topic: str, name: str, source: str) -> Iterator[ReplaySteps]:
    """The steps of a replay into a topic; the topic itself may not be there yet."""
    if root.directory is not None and not root.directory.is_dir():
        hint = f"Check the path; `tidelog topic create {topic}` makes one"
        raise NotFoundError("there is no log directory to write to", path=root.directory, hint=hint)
    place = write_place(root)
    objects = open_store(place.store_url, place.store_settings)
    metadata = open_metadata_store(place.metadata_url, objects)
    try:
        yield ReplaySteps(root, parse_topic_name(topic), metadata, objects, name, source)
    finally:
        metadata.close()

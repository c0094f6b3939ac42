"""One topic as `verify` sees it: what its catalog says, what was found in its objects and files, what follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.pipeline.jobs.job import Problem
from tidelog.pipeline.jobs.proof import Side, side_of, total
from tidelog.pipeline.jobs.verify_catalog import CatalogLook, look_at_catalog
from tidelog.pipeline.jobs.verify_files import FilesFinding
from tidelog.pipeline.jobs.verify_object import ObjectFinding, ObjectWork
from tidelog.pipeline.open_topics import cold_place
from tidelog.pipeline.part import ColdPlace
from tidelog.pipeline.root import Root
from tidelog.tier.catalog import Catalog
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from tidelog.topics.storage import LogDirectory

_SHOWN_NAMES = 5


class TopicCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a topic."""

    topic: str
    objects: int
    object_bytes: int
    files: int
    file_bytes: int
    side: Side
    problems: int


class TopicVerification:
    """What is known of one topic so far."""

    def __init__(self, log: LogDirectory, root: Root, name: str) -> None:
        parsed = parse_topic_name(name)
        self.name = name
        self.root = root
        self.place: ColdPlace | None = cold_place(root, log)
        self.files = FilesFinding(topic=name)
        self.found: dict[str, ObjectFinding] = {}
        self._log = log
        self._catalog: Catalog | None = log.tier.catalog(parsed.namespace, parsed.name) if log.tier else None
        self._look: CatalogLook | None = None
        self._wrong_before: list[Problem | str] = []
        self._notes: list[str] = []

    @property
    def cold_end(self) -> int:
        return 0 if self._look is None else self._look.next_offset

    def look(self) -> None:
        """Reads the catalog, again. What was gone before is looked for once more."""
        if self._catalog is not None:
            self._wrong_before = self._wrong
            self._look = look_at_catalog(self.name, self._catalog)
            self.found = {name: one for name, one in self.found.items() if not one.is_gone}

    def works(self) -> Iterator[ObjectWork]:
        """Objects that have not been read yet."""
        for descriptor in () if self._look is None else self._look.descriptors:
            if descriptor.object_id not in self.found:
                assert self.place is not None, "a catalog has a store"
                yield ObjectWork(topic=self.name, place=self.place, descriptor=descriptor)

    @property
    def is_settled(self) -> bool:
        """Whether another look would show nothing else: nothing changes while it is read, or it is wrong for good."""
        return not self._wrong or self._wrong == self._wrong_before

    @property
    def _wrong(self) -> list[Problem | str]:
        """What may be wrong only because somebody changed it meanwhile."""
        problems = [] if self._look is None else self._look.problems
        return [*problems, *sorted(name for name, one in self.found.items() if one.is_gone)]

    @property
    def has_joint(self) -> bool:
        """Whether the files begin where the objects end, or before, and are counted from there on."""
        begin, counted = self.files.start_offset, self.files.tally.first_offset
        return begin is None or self._look is None or (begin <= self.cold_end and counted in (None, self.cold_end))

    def result(self) -> TopicCheck:
        """What is shown."""
        found = self._objects_found()
        return TopicCheck(
            topic=self.name,
            objects=len(found),
            object_bytes=sum(one.size for one in found),
            files=self.files.files,
            file_bytes=self.files.size,
            side=side_of(total([*(one.tally for one in found), self.files.tally])),
            problems=len(self.problems()),
        )

    def _objects_found(self) -> list[ObjectFinding]:
        named = () if self._look is None else self._look.descriptors
        return [one for descriptor in named if (one := self.found.get(descriptor.object_id)) is not None]

    def problems(self) -> list[Problem]:
        """All that is wrong, in the order of the catalog, the objects and the files."""
        look = self._look
        problems = [] if look is None else list(look.problems)
        for descriptor in () if look is None else look.descriptors:
            one = self.found.get(descriptor.object_id)
            if one is None or one.is_gone:
                problems.append(
                    Problem(
                        topic=self.name,
                        place=descriptor.object_id,
                        reason="the object is missing",
                        first_offset=descriptor.start_offset,
                        last_offset=descriptor.end_offset,
                    )
                )
            else:
                problems += one.problems
        return [*problems, *self.files.problems, *self._joint_problems()]

    def _joint_problems(self) -> list[Problem]:
        begin = self.files.start_offset
        if begin is None or self._look is None or begin <= self.cold_end:
            return []
        reason = "a gap: neither an object nor a file has them"
        return [Problem(topic=self.name, reason=reason, first_offset=self.cold_end, last_offset=begin - 1)]

    def notes(self) -> list[str]:
        """What is no problem, and may be worth knowing."""
        found = self._objects_found()
        lost = [*(offset for one in found for offset in one.lost), *self.files.lost]
        rewritten = [one.object_id for one in found if one.is_rewritten]
        notes = [*self.files.notes, *self._notes]
        if lost:
            notes.append(f"{self.name}: {len(lost)} offsets are marked as lost: {_some(map(str, lost))}")
        if rewritten:
            notes.append(f"{self.name}: written again since they were shipped, with the same bytes: {_some(rewritten)}")
        return notes

    def note_unnamed(self) -> None:
        """Objects that no descriptor names."""
        if self._catalog is None or self._look is None or self._log.tier is None:
            return
        keys, named = self._catalog.keys, self._look.object_ids
        found = [info.key for info in self._log.tier.objects.list(keys.objects_prefix)]
        unnamed = [key for key in found if key.rpartition("/")[2] not in named]
        if unnamed:
            text = f"{self.name}: {len(unnamed)} objects that no descriptor names: {_some(unnamed)}"
            self._notes.append(f"{text}; `tidelog topic sweep` says what they are")


def _some(names: Sequence[str] | Iterator[str]) -> str:
    listed = list(names)
    more = "" if len(listed) <= _SHOWN_NAMES else f" and {len(listed) - _SHOWN_NAMES} more"
    return ", ".join(listed[:_SHOWN_NAMES]) + more

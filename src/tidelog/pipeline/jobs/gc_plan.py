"""What `gc` has found: data that can be shown, kept as a file, and carried out later by whoever has the file.

Invariants
- A plan names its store, and is carried out there alone.
- What is read from a file is believed only as far as it can name nothing but objects of its own topic: a plan that was
  changed by hand, or made for another topic, deletes nothing of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import DataError, NotFoundError, TidelogError
from tidelog.files import LocalFiles, explained
from tidelog.pipeline.jobs.proof import Side
from tidelog.tier.keys import TopicKeys
from tidelog.tier.replacement_cleanup import CleanupPlan
from tidelog.tier.sweep_plan import SweepPlan, SweptObject
from tidelog.topics.names import parse_topic_name

_KIND = "gc-plan"
_VERSION = 1
# By the fields of a sweep's plan: what is done about them without being asked for more.
_ACTIONS = {
    "left_over": "remove",
    "orphans": "remove",
    "unfinished": "remove",
    "staged": "remove",
    "below_start": "owner",
    "uncovered": "keep",
    "lost": "LOST",
    "damaged": "DAMAGED",
    "pending": "keep",
    "replaced": "keep",
    "newer": "keep",
    "foreign": "keep",
}


class TopicGarbage(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one topic. `catalog` is what is published and there, which must stay as it is."""

    topic: str
    sweep: SweepPlan
    cleanup: CleanupPlan
    catalog: Side


class GcPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done about all topics of a store."""

    store: str
    made_us: int
    topics: tuple[TopicGarbage, ...] = ()


class Found(msgspec.Struct, frozen=True):
    """One thing that was found, to be shown. `action`: remove, keep, owner (its owner removes it), LOST, DAMAGED."""

    topic: str
    action: str
    kind: str
    object: str
    bytes: int | None

    @property
    def is_wrong(self) -> bool:
        """Whether something that should be there is not."""
        return self.action in ("LOST", "DAMAGED")


def found_in(plan: GcPlan) -> Iterator[Found]:
    """Everything that was found, topic by topic."""
    for one in plan.topics:
        due = {old.key for old in one.cleanup.objects}
        for old in one.cleanup.objects:
            yield Found(one.topic, "remove", "replaced", old.key, old.size)
        yield from (found for found in _swept(one) if found.object not in due)


def _swept(one: TopicGarbage) -> Iterator[Found]:
    for kind, action in _ACTIONS.items():
        for found in getattr(one.sweep, kind):
            key, size = (found, None) if isinstance(found, str) else (found.key, found.size)
            yield Found(one.topic, action, kind, key, size)


# As a file


def write_plan(path: Path, plan: GcPlan) -> None:
    """Keeps a plan."""
    with explained("gc", path):
        LocalFiles().write_atomically(path, encode_document(_KIND, _VERSION, plan))


def read_plan(path: Path) -> GcPlan:
    """A plan that was kept; DataError when it is none, or names what it has no business with."""
    if not path.exists():
        raise NotFoundError("there is no plan", path=path, hint="Make one: `tidelog pipeline gc --plan FILE`")
    with explained("gc", path):
        data = LocalFiles().read(path.resolve())
    try:
        plan = decode_document(_KIND, _VERSION, data, GcPlan)
        for one in plan.topics:
            _check(one)
    except TidelogError as error:
        hint = "Make a new one: `tidelog pipeline gc --plan FILE`"
        raise DataError(f"this is not a plan of gc: {error.message}", path=path, hint=hint) from error
    return plan


def _check(one: TopicGarbage) -> None:
    name = parse_topic_name(one.topic)
    keys = TopicKeys(name.namespace, name.name)
    swept = (*one.sweep.below_start, *one.sweep.left_over, *one.sweep.orphans)
    for found in swept:
        _check_object(keys, found)
    for upload in one.sweep.unfinished:
        if not upload.key.startswith((keys.objects_prefix, keys.intake_prefix)) or ".." in upload.key:
            raise DataError(f"{upload.key} is not an upload of {one.topic}")
    for staged in one.sweep.staged:
        if keys.parse_staged(staged.key) is None:
            raise DataError(f"{staged.key} is not what was staged for {one.topic}")


def _check_object(keys: TopicKeys, found: SweptObject) -> None:
    name = keys.parse_object(found.key)
    if name is None or (name.start, name.end, name.epoch) != (found.start_offset, found.end_offset, found.epoch):
        raise DataError(f"{found.key} is not an object of this topic with these offsets")

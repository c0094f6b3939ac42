"""Imports the messages of a Danube topic into a topic of ours, keeping their offsets.

Invariants
- The topic only ever grows by the next message, so a killed import leaves a prefix of the whole. A second run reads the
  source from the start, compares it with everything that the topic already has, and continues after that.
- Nothing is overwritten or mixed: a topic that holds anything else at one of these offsets is refused.
- Every offset of the source is stored, found stored, or reported: in an error, or in the summary after
  `on_damage="skip"`.
- Incarnations of a topic are not mixed. Objects that have no time in their names are read in the order of the store's
  times; a copy of a store has different times, so their messages must have been published in that order.
- What one copy of the source lacks (an object) is taken from another one (the WAL) where that continues it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Literal

import msgspec

from tidelog.codec import MAX_OFFSET
from tidelog.errors import CorruptionError, GapError, InputError, MessageTooLargeError, TidelogError, offsets_text
from tidelog.imports.danube.frames import Damage, Event, Run
from tidelog.imports.danube.message import decode_danube_message, to_message
from tidelog.imports.danube.objects import Gap, Step, in_order
from tidelog.topics.message import Message
from tidelog.topics.topic import Topic

OnDamage = Literal["stop", "skip"]
OnRestart = Literal["stop", "renumber"]
Copy = Callable[[], Iterator[Event]]
OpenTopic = Callable[[int], Topic]

# Well below what the log lets wait at once.
_BATCH_MESSAGES = 4096
MAX_LISTED = 1000
_MAX_LOST = 10_000_000
_HEADER_BYTES = 16
_SKIP_HINT = "--on-damage skip imports everything else and marks what is missing as lost"


class DamagedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that were no message. Whether one is missing because of them, the lost offsets say."""

    file: str
    byte: int
    bytes: int
    reason: str
    is_tail: bool


class ImportSummary(msgspec.Struct, kw_only=True):
    """What an import has done so far, and in the end. The lists end after `MAX_LISTED`, the numbers count all."""

    first_offset: int | None = None
    last_offset: int | None = None
    messages: int = 0
    bytes: int = 0
    already_there: int = 0
    repeated: int = 0
    renumbered: int = 0
    skipped: int = 0
    lost: list[tuple[int, int]] = []
    damages: int = 0
    damaged: list[DamagedPlace] = []


def import_messages(
    copies: Sequence[Copy],
    open_topic: OpenTopic,
    *,
    on_damage: OnDamage = "stop",
    on_restart: OnRestart = "stop",
    summary: ImportSummary | None = None,
) -> ImportSummary:
    """Imports the contents of the copies, one after the other, and returns once it is on disk.

    Each copy is called for the frames of one location where the topic is kept, from its beginning; earlier copies take
    precedence. `open_topic` is called with the first offset as soon as there is a message, and not before. A given
    `summary` is filled as the import proceeds, and is also valid if it ends in an error.
    """
    work = _Import(copies, open_topic, on_damage, on_restart, ImportSummary() if summary is None else summary)
    try:
        work.run()
    except BaseException:
        with suppress(TidelogError):  # the error on its way is the one to be seen
            work.flush()
        raise
    work.flush()
    return work.summary


class _Import:
    """One import in progress."""

    def __init__(
        self,
        copies: Sequence[Copy],
        open_topic: OpenTopic,
        on_damage: OnDamage,
        on_restart: OnRestart,
        summary: ImportSummary,
    ) -> None:
        self.summary = summary
        self._copies = copies
        self._open_topic = open_topic
        self._skips = on_damage == "skip"
        self._renumbers = on_restart == "renumber"
        self._opened: Topic | None = None
        self._undated_file = ""
        self._latest_ms = 0

    def run(self) -> None:
        events = chain.from_iterable(copy() for copy in self._copies)
        for step in in_order(events, self._first_repeated_difference, renumber=self._renumbers):
            self._take(step)

    def flush(self) -> None:
        if self._opened is not None:
            self._opened.flush()

    def _take(self, step: Step) -> None:
        if isinstance(step, Run):
            self._accept(step)
        elif isinstance(step, Gap):
            self._close_gap(step)
        else:
            self._note(step)

    def _note(self, damage: Damage) -> None:
        self.summary.damages += 1
        if len(self.summary.damaged) < MAX_LISTED:
            file, byte, size, reason, is_tail, _ = damage
            self.summary.damaged.append(DamagedPlace(file=file, byte=byte, bytes=size, reason=reason, is_tail=is_tail))

    # Messages

    def _accept(self, run: Run) -> None:
        """The messages that come next: there already, or to be appended."""
        _check_offsets(run)
        topic = self._topic(run)
        self._check_time(run)
        there = run.slice(0, max(0, min(run.count, topic.next_offset - run.first_offset)))
        lost: list[int] = []
        difference = self._first_difference(there, lost)
        if difference is not None:
            raise _other_content(topic, there, difference)
        for offset in lost:
            self._count_lost(offset, 1)
        self.summary.already_there += there.count
        for start in range(there.count, run.count, _BATCH_MESSAGES):
            self._append(topic, run.slice(start, min(run.count, start + _BATCH_MESSAGES)))

    def _check_time(self, run: Run) -> None:
        """Of files that only the store dates, what each adds to the topic must have been published in their order."""
        if run.is_dated or not self._renumbers or run.file == self._undated_file:
            return
        self._undated_file = run.file
        time_ms = _first_time_ms(run)
        if time_ms is not None and time_ms < self._latest_ms:
            raise _time_error(run)
        self._latest_ms = self._latest_ms if time_ms is None else time_ms

    def _append(self, topic: Topic, run: Run) -> None:
        messages: list[Message] = []
        for index, message in enumerate(self._messages(run)):
            if message is not None:
                messages.append(message)
                continue
            self._append_messages(topic, run.slice(index - len(messages), index), messages)
            messages = []
            self._mark_lost(topic, run.first_offset + index, 1)
        self._append_messages(topic, run.slice(run.count - len(messages)), messages)

    def _append_messages(self, topic: Topic, run: Run, messages: list[Message]) -> None:
        try:
            if messages:
                topic.append_many(messages)
        except InputError:
            self._append_up_to_the_culprit(topic, run, messages)
        self._count(run)

    def _append_up_to_the_culprit(self, topic: Topic, run: Run, messages: list[Message]) -> None:
        """The batch was refused; appends one by one to find the message that does not fit."""
        for index, message in enumerate(messages):
            try:
                topic.append(message)
            except InputError as error:
                self._count(run.slice(0, index))
                raise _does_not_fit(run, index, error) from error

    def _count(self, run: Run) -> None:
        summary = self.summary
        if not run.count:
            return
        if summary.first_offset is None:
            summary.first_offset = run.first_offset
        summary.last_offset = run.next_offset - 1
        summary.messages += run.count
        summary.bytes += run.size
        summary.renumbered += run.count if run.shift else 0

    def _messages(self, run: Run) -> Iterator[Message | None]:
        """Messages of ours; None in the place of one that cannot be understood, where that is to be skipped."""
        for index, payload in enumerate(run.frames.payloads()):
            frame_offset = run.frames.first_offset + index
            byte = run.byte(index) + _HEADER_BYTES
            try:
                danube = decode_danube_message(payload, frame_offset, run.file, byte)
            except CorruptionError as error:
                if not self._skips:
                    error.hint = _SKIP_HINT
                    raise
                self._note(Damage(run.file, error.byte, len(payload), error.reason, False))
                yield None
                continue
            yield to_message(danube, frame_offset, frame_offset + run.shift)

    # What was imported before

    def _topic(self, run: Run) -> Topic:
        if self._opened is None:
            self._opened = _checked(self._open_topic(run.first_offset), run)
        return self._opened

    def _first_repeated_difference(self, run: Run) -> int | None:
        difference = self._first_difference(run)
        self.summary.repeated += run.count if difference is None else difference
        return difference

    def _first_difference(self, run: Run, lost: list[int] | None = None) -> int | None:
        """The index of the first message that is another one in the topic, or before its start; None if there is none.

        An offset that is marked as lost in the topic can no longer be filled: it differs from nothing and joins `lost`.
        """
        topic = self._opened
        if not run.count:
            return None
        if topic is None or run.first_offset < topic.start_offset:
            return 0
        stored = topic.read(run.first_offset, run.next_offset, on_gap="skip", isolation="read_uncommitted")
        current = next(stored, None)
        for index, message in enumerate(self._messages(run)):
            offset = run.first_offset + index
            if current is not None and current.offset == offset:
                if message != current:
                    return index
                current = next(stored, None)
            elif lost is not None:
                lost.append(offset)
        return None

    # What is missing

    def _close_gap(self, gap: Gap) -> None:
        first = gap.first if self._renumbers or not gap.is_credible else self._fill(gap)
        if first > gap.last:
            return
        if not self._skips:
            raise _gap_error(gap, first)
        if not gap.is_credible and gap.after is not None:
            reason = f"offset {gap.after.frames.first_offset} does not belong there"
            self._note(Damage(gap.after.file, gap.after.byte(), gap.after.size, reason, False))
            return
        topic = self._opened if gap.after is None else self._topic(gap.after)
        if topic is None:  # no message at all: the damage is reported, and there is no topic to mark it in
            return
        if gap.last + 1 - first > _MAX_LOST:
            raise _gap_error(gap, first, f"These are more than {_MAX_LOST}: too many to be marked as lost")
        there = min(max(topic.next_offset - first, 0), gap.last + 1 - first)
        self._look_for_lost(topic, first, first + there)
        self._mark_lost(topic, first + there, gap.last + 1 - first - there)

    def _fill(self, gap: Gap) -> int:
        """Takes missing messages from other copies; returns the first offset that is still missing.

        A copy is trusted only from the position where it holds the message before the gap, followed by the next ones:
        the same offsets elsewhere in it may be those of another incarnation of the topic.
        """
        first = gap.first
        for copy in self._copies if len(self._copies) > 1 else ():
            is_continued = False
            for run in _runs_of(copy):
                is_continued = self._continues(run, first) or (is_continued and run.first_offset == first)
                if is_continued and run.next_offset > first:
                    found = run.slice(first - run.first_offset, min(run.next_offset, gap.last + 1) - run.first_offset)
                    self._accept(found)
                    first = found.next_offset
                if first > gap.last:
                    return first
        return first

    def _continues(self, run: Run, first: int) -> bool:
        """Whether the run holds the message before `first`, the same that the topic has."""
        if not run.first_offset < first <= run.next_offset:
            return False
        return self._first_difference(run.slice(first - 1 - run.first_offset, first - run.first_offset)) is None

    def _look_for_lost(self, topic: Topic, first: int, stop: int) -> None:
        """Offsets that an earlier run marked as lost."""
        expected = first
        stored = topic.read(first, stop, on_gap="skip", isolation="read_uncommitted") if first < stop else ()
        for message in stored:
            self._count_lost(expected, message.offset - expected)
            expected = message.offset + 1
        self._count_lost(expected, stop - expected)

    def _mark_lost(self, topic: Topic, first: int, count: int) -> None:
        """As a repair does: offsets stay contiguous, and readers can tell lost from present."""
        for start in range(0, count, _BATCH_MESSAGES):
            topic._append_lost(min(_BATCH_MESSAGES, count - start))
        self._count_lost(first, count)

    def _count_lost(self, first: int, count: int) -> None:
        if not count:
            return
        lost = self.summary.lost
        self.summary.skipped += count
        if lost and lost[-1][1] == first - 1:
            lost[-1] = (lost[-1][0], first + count - 1)
        elif len(lost) < MAX_LISTED:
            lost.append((first, first + count - 1))


def _first_time_ms(run: Run) -> int | None:
    """When its first message was published, if that can be understood."""
    payload = run.frames.slice(0, 1).payloads()[0]
    try:
        return decode_danube_message(payload, run.frames.first_offset, run.file, run.byte()).publish_time
    except CorruptionError:
        return None


def _time_error(run: Run) -> CorruptionError:
    return CorruptionError(
        "this message was published before those of an object that the store had earlier: which life of the topic was "
        "first, neither names nor times tell",
        path=run.file,
        byte=run.byte(),
        hint="Import from the store that Danube wrote to: a copy of it has other times. Or put the objects of each "
        "life below a URL of their own, and import them into topics of their own with --topic",
    )


def _runs_of(copy: Copy) -> Iterator[Run]:
    return (event for event in copy() if isinstance(event, Run))


def _check_offsets(run: Run) -> None:
    index = max(0, MAX_OFFSET + 1 - run.first_offset)
    if index < run.count:
        raise CorruptionError(
            f"offset {run.first_offset + index}, and the last that a message may have is {MAX_OFFSET},",
            path=run.file,
            byte=run.byte(index),
            hint="Import what is before it to a topic of its own",
        )


def _checked(topic: Topic, run: Run) -> Topic:
    """A topic that can take this run next, or has it."""
    start, end, first = topic.start_offset, topic.next_offset, run.first_offset
    if start <= first <= end:
        return topic
    if start == end:
        raise InputError(
            f"the topic {topic.name} is empty and begins at offset {start}, the messages to import begin at {first}",
            hint=f"Delete it with `tidelog topic delete {topic.name}`, or import to another one with --topic",
        )
    if first < start:
        raise InputError(
            f"the topic {topic.name} begins at offset {start}, the messages to import at {first}: "
            "it does not come from this source",
            hint="Import to another one with --topic",
        )
    raise GapError(
        f"the topic {topic.name} ends before offset {end}, and {run.file} begins at {first}: "
        f"{offsets_text(end, first - 1)} missing between them",
        first=end,
        last=first - 1,
        path=run.file,
        hint="Add the place that has them (--wal, --objects), or import to another topic with --topic",
    )


def _other_content(topic: Topic, run: Run, index: int) -> InputError:
    offset = run.first_offset + index
    return InputError(
        f"the topic {topic.name} holds another message at offset {offset} than byte {run.byte(index)} of {run.file}",
        path=run.file,
        hint="It does not come from this source, or was appended to since: import to another topic with --topic",
    )


def _does_not_fit(run: Run, index: int, error: InputError) -> InputError:
    kind = MessageTooLargeError if isinstance(error, MessageTooLargeError) else InputError
    place = f"byte {run.byte(index)} of {run.file}"
    return kind(f"the message at offset {run.first_offset + index}, {place}: {error.message}", hint=error.hint)


def _gap_error(gap: Gap, first: int, why_not: str | None = None) -> CorruptionError | GapError:
    missing = offsets_text(first, gap.last)
    hint = why_not or _SKIP_HINT
    if gap.damage is not None:
        return CorruptionError(
            f"{missing} cannot be read, there is {gap.damage.reason}",
            path=gap.damage.file,
            byte=gap.damage.byte,
            hint=hint,
        )
    assert gap.after is not None, "what is missing at the end is missing because of damage"
    where = f"before byte {gap.after.byte()} of {gap.after.file}"
    return GapError(f"{missing} missing {where}", first=first, last=gap.last, path=gap.after.file, hint=hint)

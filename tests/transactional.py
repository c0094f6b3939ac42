"""Topics with transactions, for tests of what reads them: how they are filled, and what a reader has to see.

The oracle is straightforward: a control record of the producer after a message decides that message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from tidelog.log import Log
from tidelog.log.transactions import Control, control_payload
from tidelog.topics.message import encode_envelope
from tidelog.topics.topic import Topic

TIME_US = 1_700_000_000_000_000
_PRODUCER = struct.Struct("<BBqhiB")


class Step(NamedTuple):
    """What is appended: a plain message (no producer), one of a transaction, or the end of one (`commits` is said)."""

    producer: int | None = None
    commits: bool | None = None
    key: bytes | None = None
    is_transactional: bool = True

    @property
    def is_control(self) -> bool:
        return self.commits is not None


PLAIN = Step()
_KEYS = st.sampled_from([None, b"a", b"b", b"c"])
_PRODUCERS = st.integers(1, 3)
_STEP = st.one_of(
    _KEYS.map(lambda key: Step(key=key)),
    st.tuples(_PRODUCERS, _KEYS, st.integers(0, 3)).map(lambda one: Step(one[0], None, one[1], one[2] > 0)),
    st.tuples(_PRODUCERS, st.booleans()).map(lambda one: Step(*one)),
)
# A list of any length is mostly one of a few.
STEPS = st.integers(0, 40).flatmap(lambda count: st.lists(_STEP, min_size=count, max_size=count))


def payload_of(step: Step, number: int, size: int = 0) -> bytes:
    """The payload of a step; the value of a message is its number, padded to a size."""
    if step.commits is not None:
        assert step.producer is not None
        return control_payload(Control(step.commits, step.producer, 0, 0, TIME_US + number))
    extension = b""
    if step.producer is not None:
        extension = _PRODUCER.pack(5, 15, step.producer, 0, number, int(step.is_transactional))
    return encode_envelope(b"%d" % number + b" " * size, step.key, None, TIME_US + number, extension)


def fill(log: Log | Topic, steps: Sequence[Step], size: int = 0) -> None:
    """Appends all of them, one by one."""
    owned = log if isinstance(log, Log) else log._log
    for step in steps:
        owned.append(payload_of(step, owned.next_offset, size))


def outcome(steps: Sequence[Step], offset: int) -> bool | None:
    """Whether the message of a step is committed; None while its transaction is open."""
    step = steps[offset]
    if step.producer is None or not step.is_transactional:
        return True
    later = (one.commits for one in steps[offset + 1 :] if one.producer == step.producer and one.is_control)
    return next(later, None)


def visible(steps: Sequence[Step], start: int = 0, stop: int | None = None) -> list[int]:
    """The offsets that a reader of committed messages sees."""
    found = []
    for offset in range(start, len(steps) if stop is None else min(stop, len(steps))):
        if not steps[offset].is_control:
            decided = outcome(steps, offset)
            if decided is None:
                break
            found += [offset] if decided else []
    return found


def stored(steps: Sequence[Step], start: int = 0, stop: int | None = None) -> list[int]:
    """The offsets that a reader of uncommitted messages sees."""
    return [
        offset
        for offset in range(start, len(steps) if stop is None else min(stop, len(steps)))
        if not steps[offset].is_control
    ]


def last_stable_offset(steps: Sequence[Step]) -> int:
    """The first offset that is not decided."""
    opened = (at for at, step in enumerate(steps) if not step.is_control and outcome(steps, at) is None)
    return next(opened, len(steps))

"""The open transactions of a topic, and the way out of one whose coordinator is gone.

Readers need none of this: they find the outcome of a transaction in the log (`log/isolation.py`). This is for people:
what holds readers up, and since which offset.

Invariants
- The topic is read once, from its start, when somebody first asks, and from there on only what was appended since. No
  payload is kept.
- A transaction is aborted by a control record like any other; whether it is open is looked up in the same step, under
  one lock, so that no second one is written for it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from tidelog.errors import NotFoundError
from tidelog.log.reader import BatchReader
from tidelog.log.transactions import Control, OpenTransaction, Transactions, control_payload, marks_of

OpenReader = Callable[[int], BatchReader]


class TopicTransactions:
    """What is open in a topic, as far as it was read. Any number of threads may use it at once."""

    def __init__(self, name: str, open_reader: OpenReader, start_offset: Callable[[], int]) -> None:
        """`open_reader` reads everything from an offset to the end, uncommitted messages too."""
        self._name = name
        self._open_reader = open_reader
        self._start_offset = start_offset
        self._lock = Lock()
        self._known = Transactions()
        self._reached = 0

    def open(self) -> list[OpenTransaction]:
        """In the order of their first offsets."""
        with self._lock:
            self._read_on()
            return self._known.open

    def last_stable_offset(self) -> int:
        """Below it everything is decided."""
        with self._lock:
            start = self._read_on()
            return max(start, self._known.last_stable_offset(self._reached))

    def abort(self, producer_id: int, now_us: int, append: Callable[[bytes], int]) -> OpenTransaction:
        """Ends the open transaction of a producer; `append` returns once the control record is durable."""
        with self._lock:
            self._read_on()
            found = next((one for one in self._known.open if one.producer_id == producer_id), None)
            if found is None:
                raise self._not_open(producer_id)
            append(control_payload(Control(False, producer_id, found.epoch, 0, now_us)))
            self._read_on()
            return found

    def _not_open(self, producer_id: int) -> NotFoundError:
        others = ", ".join(str(one.producer_id) for one in self._known.open)
        hint = f"Open are those of the producers {others}" if others else "No transaction is open there"
        return NotFoundError(f"{self._name}: producer {producer_id} has no open transaction", hint=hint)

    def _read_on(self) -> int:
        """Returns where the topic starts."""
        start = self._start_offset()
        self._known.forget_open_before(start)
        reader = self._open_reader(max(start, self._reached))
        for batch in reader:
            for mark in marks_of(batch) or ():
                self._known.record(mark)
            self._reached = batch.next_offset
            self._known.forget_before(self._reached)  # nobody asks here for what was aborted
        self._reached = reader.offset
        return start

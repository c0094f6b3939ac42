"""Requests to etcd that threads make at the same time become one: a node that opens hundreds of partitions makes few.

    two requests are under way  ──>  further ones gather  ──>  the first of them to end is followed by all that gathered

What gathers are reads of keys, in one transaction that reads, and transactions, in one that contains them. (etcd takes
a transaction that contains others for a write, whatever these do: it would go through its log.)

Invariants
- Nobody waits for others to come: as long as fewer than `UNDER_WAY` are under way, a request is made at once, as it is.
- A read is made after it was asked for, so that it sees everything that was answered before.
- Each transaction has its own conditions and its own outcome. None of a batch checks or writes what another one of it
  writes: so their order means nothing, and each is what it would have been alone.
- A batch is small enough for etcd: 128 operations, those of the transactions in it included, and 1.5 MiB.
- A batch that is refused has changed nothing, and all of it is asked one by one: what is wrong with one of them is an
  error of that one alone. One without an answer is undecided for all of them.
- Whoever waits and is interrupted leaves nobody waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import islice
from threading import Lock
from typing import Any

from tidelog.errors import StoreUnavailableError, TidelogError

Question = dict[str, Any]
Answer = dict[str, Any]
Ask = Callable[[Question], Answer]
UNDER_WAY = 2
_MAX_OPERATIONS = 100
"""etcd takes 128, unless it was told otherwise."""
_MAX_BYTES = 512 << 10


class _Request:
    """One that a thread waits for. `batch`: it is to be made by that thread, for all of these."""

    def __init__(self, question: Question, checked: frozenset[str], written: frozenset[str], size: int) -> None:
        self.question = question
        self.checked = checked
        self.written = written
        self.operations = 1 + max(len(question["success"]), len(question["compare"]))  # one contains the others
        self.size = size
        self.batch: list[_Request] = []
        self.answer: Answer = {}
        self.error: TidelogError | None = None
        self._bell = Lock()
        self._bell.acquire()

    def wait(self) -> None:
        self._bell.acquire()

    def wake(self) -> None:
        self._bell.release()


class Batches:
    """Gathers transactions of one kind: those that write, or those that read and have no conditions."""

    def __init__(self, ask: Ask, *, are_reads: bool = False) -> None:
        """`ask` makes a transaction: an error of the store's, or its answer."""
        self._ask = ask
        self._make_together = self._read_together if are_reads else self._write_together
        self._forget()

    def _forget(self) -> None:
        """A forked child has none of the threads that are waited for."""
        self._process = os.getpid()
        self._guard = Lock()
        self._free = UNDER_WAY
        self._waiting: list[_Request] = []

    def ask(
        self,
        question: Question,
        checked: frozenset[str] = frozenset(),
        written: frozenset[str] = frozenset(),
        size: int = 0,
    ) -> Answer:
        """The answer to a transaction, as if it had been made alone. `size` is about that of its values."""
        if self._process != os.getpid():
            self._forget()
        request = _Request(question, checked, written, size)
        with self._guard:
            if self._free > 0:
                self._free -= 1
                request.batch = [request]
            else:
                self._waiting.append(request)
        if not request.batch:
            self._wait(request)
        if request.batch:
            self._lead(request.batch)
        if request.error is not None:
            raise request.error
        return request.answer

    def _wait(self, request: _Request) -> None:
        try:
            request.wait()
        except BaseException:
            with self._guard:
                if request in self._waiting:
                    self._waiting.remove(request)
                    raise
            if request.batch:
                self._lead(request.batch)
            raise

    def _lead(self, batch: Sequence[_Request]) -> None:
        """Makes the requests of a batch, and lets the first of those that gathered make the next."""
        try:
            self._make(batch)
        finally:
            with self._guard:
                following = self._take()
                if following:
                    following[0].batch = following
                else:
                    self._free += 1
            for one in batch[1:]:
                one.wake()
            if following:
                following[0].wake()

    def _take(self) -> list[_Request]:
        """Those that are made together next: the first that waits, and what goes with it."""
        taken: list[_Request] = []
        left: list[_Request] = []
        checked: set[str] = set()
        written: set[str] = set()
        operations = size = 0
        for one in self._waiting:
            is_apart = written.isdisjoint(one.checked | one.written) and checked.isdisjoint(one.written)
            is_small = operations + one.operations <= _MAX_OPERATIONS and size + one.size <= _MAX_BYTES
            if taken and not (is_apart and is_small):
                left.append(one)
                continue
            taken.append(one)
            checked |= one.checked
            written |= one.written
            operations += one.operations
            size += one.size
        self._waiting = left
        return taken

    def _make(self, batch: Sequence[_Request]) -> None:
        undecided = StoreUnavailableError("the request was given up")
        for one in batch:
            one.error = undecided  # if this thread is interrupted
        if len(batch) == 1:
            self._make_alone(batch[0])
            return
        try:
            self._make_together(batch)
        except StoreUnavailableError as error:
            for one in batch:
                one.error = StoreUnavailableError(error.reason, operation=error.operation, hint=error.hint)
        except TidelogError:
            for one in batch:
                self._make_alone(one)

    def _write_together(self, batch: Sequence[_Request]) -> None:
        within = [{"request_txn": one.question} for one in batch]
        answer = self._ask({"compare": [], "success": within, "failure": []})
        for one, response in zip(batch, answer["responses"], strict=True):
            one.answer, one.error = response["response_txn"] | {"header": answer["header"]}, None

    def _read_together(self, batch: Sequence[_Request]) -> None:
        reads = [read for one in batch for read in one.question["success"]]
        answer = self._ask({"compare": [], "success": reads, "failure": []})
        responses = iter(answer["responses"])
        for one in batch:
            own = list(islice(responses, len(one.question["success"])))
            one.answer, one.error = answer | {"responses": own}, None

    def _make_alone(self, one: _Request) -> None:
        try:
            one.answer, one.error = self._ask(one.question), None
        except TidelogError as error:
            one.error = error

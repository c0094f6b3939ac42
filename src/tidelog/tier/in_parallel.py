"""The same work for many things at once, in a few threads that end with it.

Invariants
- The caller works too: where no thread can be begun any more, at the end of the interpreter, it does all of it.
- Each thing is worked on once, whatever happens to others. The first error, in the order of the things, is raised when
  all are done; an interrupted caller begins no more of them, and waits for those that are under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item], threads: int, name: str) -> list[Result]:
    """What the work gives for each, in their order."""
    run = _Run(work, items)
    helpers = [Thread(target=run.help, name=f"{name} {number}", daemon=True) for number in range(1, threads)]
    begun: list[Thread] = []
    try:
        with contextlib.suppress(RuntimeError):
            for helper in helpers[: len(items) - 1]:
                helper.start()
                begun.append(helper)
        run.help()
    except BaseException:
        run.stop()
        raise
    finally:
        for helper in begun:
            helper.join()
    return run.outcome()


class _Run(Generic[Item, Result]):
    def __init__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> None:
        self._work = work
        self._items = items
        self._results: dict[int, Result] = {}
        self._errors: dict[int, BaseException] = {}
        self._guard = Lock()
        self._next = 0

    def help(self) -> None:
        while (number := self._take()) is not None:
            try:
                self._results[number] = self._work(self._items[number])
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                self._errors[number] = error
                if not isinstance(error, Exception):
                    self.stop()

    def _take(self) -> int | None:
        with self._guard:
            number = self._next
            self._next = number + 1
            return number if number < len(self._items) else None

    def stop(self) -> None:
        with self._guard:
            self._next = len(self._items)

    def outcome(self) -> list[Result]:
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[number] for number in range(len(self._items))]

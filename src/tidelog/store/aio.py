"""Async twins: `ship_async` is made from `ship`, where `ship` is defined.

    class Topic:
        def ship(self) -> int: ...

        ship_async = twin(ship)

Invariants
- A twin takes the parameters of its original, returns the same and raises the same; type checkers and editors see that.
  A subclass that overrides the original has overridden the twin too.
- The event loop is never blocked: the original runs in a thread that may wait for a store, or where `run` takes it.
  Those threads are not the event loop's own, and hot reads never wait for one of them.
- The context variables of the task are those of the call.
- A thread cannot be stopped halfway. What was opened for a task that is cancelled meanwhile goes to `give_back`: no
  other code would close it.

Calls that wait without a thread (appending, reading, receiving) are written by hand. `twin_of` checks their parameters
against those of the original, and gives them their docstrings.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from itertools import islice
from threading import Lock
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from tidelog.store.scheduler import in_store_thread

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Owner = TypeVar("Owner")
Item = TypeVar("Item")
Waiting = TypeVar("Waiting", bound=Callable[..., object])

ITEMS_AT_ONCE = 1000


class Run(Protocol):
    """Where a twin runs its call: `owner` is the object whose method it is, None for a function."""

    def __call__(self, owner: Any, call: Callable[[], Result], /) -> Coroutine[Any, Any, Result]: ...


async def in_thread(owner: object, call: Callable[[], Result]) -> Result:
    """In a thread that may wait for a store."""
    return await in_store_thread(call)


async def at_once(owner: object, call: Callable[[], Result]) -> Result:
    """In the thread of the event loop: the call waits for nothing."""
    return call()


def twin(
    original: Callable[Arguments, Result],
    run: Run = in_thread,
    *,
    give_back: Callable[[Result], object] | None = None,
    before: Callable[[], object] | None = None,
) -> Callable[Arguments, Coroutine[Any, Any, Result]]:
    """The async twin of a method or a function.

    `give_back` gets the result if its task was cancelled meanwhile: it closes what was opened. `before` is called in
    the thread of the event loop, before anything else.
    """
    bind = _binder(original)

    async def call_in_task(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if before is not None:
            before()
        owner, call = bind(*args, **kwargs)
        if give_back is not None:
            return await made_in_thread(call, give_back)
        return await run(owner, call)

    note = "" if give_back is None else "If the task is cancelled meanwhile, what it opened is closed."
    return _named(functools.wraps(original)(call_in_task), original, note)


def twin_iterator(
    original: Callable[Arguments, Iterator[Item]], run: Run = in_thread
) -> Callable[Arguments, AsyncIterator[Item]]:
    """The twin of a method that yields, for `async for`. Items are taken many at a time."""
    bind = _binder(original)

    async def iterate_in_task(*args: Arguments.args, **kwargs: Arguments.kwargs) -> AsyncIterator[Item]:
        owner, call = bind(*args, **kwargs)
        async for item in iterated(owner, call, run):
            yield item

    functools.update_wrapper(iterate_in_task, original)
    given = inspect.signature(original)
    shown = given.replace(return_annotation=f"Async{given.return_annotation}")
    iterate_in_task.__signature__ = shown  # type: ignore[attr-defined]
    return _named(iterate_in_task, original, "")


async def iterated(owner: object, call: Callable[[], Iterator[Item]], run: Run) -> AsyncIterator[Item]:
    """The items of an iterator, many at a time, for twins that choose where they run."""
    items = await run(owner, call)
    while some := await run(owner, lambda: list(islice(items, ITEMS_AT_ONCE))):
        for item in some:
            yield item


def twin_of(
    original: Callable[Concatenate[Any, Arguments], object],
) -> Callable[[Callable[Concatenate[Owner, Arguments], Result]], Callable[Concatenate[Owner, Arguments], Result]]:
    """Declares a handwritten twin. Its docstring is derived; what it says itself is added."""
    return lambda written: _named(written, original, written.__doc__ or "")


def twin_by(
    original: Callable[Concatenate[Owner, Arguments], object], work: Callable[..., Result], note: str = ""
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """A twin that `work` does: it gets what the original would, defaults filled in, and repeats no signature."""
    signature = inspect.signature(original)

    def call(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        return work(*given.args, **given.kwargs)

    returns = inspect.signature(work).return_annotation
    call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
    return _named(call, original, note)


def _binder(original: Callable[Arguments, Result]) -> Callable[Arguments, tuple[object, Callable[[], Result]]]:
    """What to call for some arguments: a method is looked up in the object, since a subclass may have overridden it."""
    name: str = original.__name__

    def bind(*args: Arguments.args, **kwargs: Arguments.kwargs) -> tuple[object, Callable[[], Result]]:
        if is_method:
            return args[0], functools.partial(getattr(args[0], name), *args[1:], **kwargs)
        return None, functools.partial(original, *args, **kwargs)

    is_method = original.__code__.co_varnames[:1] == ("self",)
    return bind


def _named(made: Waiting, original: Callable[..., object], note: str) -> Waiting:
    """Gives a twin the name and the docstring that `help` and editors show."""
    made.__name__ = f"{original.__name__}_async"
    made.__qualname__ = f"{original.__qualname__}_async"
    made.__module__ = original.__module__
    made.__doc__ = f"Like `{original.__name__}`, without blocking the event loop."
    if note:
        made.__doc__ += f"\n\n{inspect.cleandoc(note)}"
    return made


async def made_in_thread(make: Callable[[], Result], give_back: Callable[[Result], object]) -> Result:
    """What `make` returns. If the task is cancelled while it works, `give_back` takes it, in a worker thread too."""
    making = _Making(make, give_back)
    try:
        return await in_store_thread(making.run)
    except asyncio.CancelledError:
        left = making.abandon()
        if left is not None:
            # Not waited for: who cancels does not want to wait, and the loop waits for its threads when it ends.
            asyncio.get_running_loop().run_in_executor(None, give_back, left)
        raise


class _Making(Generic[Result]):
    """One such work: the second to come, the thread with the result or the task that gives up, sees to it."""

    def __init__(self, make: Callable[[], Result], give_back: Callable[[Result], object]) -> None:
        self._make = make
        self._give_back = give_back
        self._lock = Lock()
        self._is_abandoned = False
        self._made: Result | None = None

    def run(self) -> Result:
        """In the worker thread."""
        made = self._make()
        with self._lock:
            self._made = made
            is_abandoned = self._is_abandoned
        if is_abandoned:
            self._give_back(made)
        return made

    def abandon(self) -> Result | None:
        """In the task: what is there already and nobody takes."""
        with self._lock:
            self._is_abandoned = True
            return self._made


class _Closes(Protocol):
    def close(self) -> None: ...

    async def close_async(self) -> None: ...


class ClosedAtExit:
    """What `with` and `async with` close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: _Closes, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self: _Closes, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close_async()

"""The event loop of a client, and how threads and tasks of the program reach it.

    class RemoteTopic:
        async def _ship(self) -> int:
            '''Ships everything.'''

        ship, ship_async = both(_ship)

Invariants
- Every call is written once, as a coroutine that runs in the client's own loop; `both` makes the name that blocks and
  the name that is awaited. They take the same parameters, return the same and raise the same.
- Neither blocks the event loop of the program. A call that is cancelled or interrupted is cancelled in the loop, too.
- After a fork the child has no such loop: calls raise ClosedError, they never hang.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Event, Thread
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tidelog.errors import ClosedError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_STOP_SECONDS = 10.0


class Bridge:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._is_closed = False
        self.loop = asyncio.new_event_loop()
        self.on_close: Callable[[], None] = lambda: None
        """Closes what is open in the loop; called there, before it ends."""
        started = Event()
        self._thread = Thread(target=self._run, args=(started,), name=name, daemon=True)
        self._thread.start()
        started.wait()

    def _run(self, started: Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(started.set)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def check(self) -> None:
        """ClosedError if nothing can be done here any more."""
        if self._pid != os.getpid():
            raise ClosedError(
                "this client was connected before a fork", hint="Call tidelog.connect in the process that uses it"
            )
        if self._is_closed:
            raise ClosedError("this client is closed", hint="Call tidelog.connect again")

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Runs a coroutine in the loop."""
        try:
            self.check()
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except BaseException:
            work.close()
            raise

    def soon(self, call: Callable[[], object]) -> None:
        """Has something called in the loop."""
        self.check()
        self.loop.call_soon_threadsafe(call)

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine, for a thread that waits."""
        return waited(self.start(work))

    def close(self) -> None:
        """Ends the loop, and the tasks in it."""
        if self._is_closed or self._pid != os.getpid():
            self._is_closed = True
            return
        self._is_closed = True
        ending = asyncio.run_coroutine_threadsafe(_end(self.on_close), self.loop)
        try:
            ending.result(_STOP_SECONDS)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_STOP_SECONDS)


class LoopBridge(Bridge):
    """The same over an event loop that runs already, a server's: its tasks await, and its other threads may block."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pid = os.getpid()
        self._is_closed = False
        self.loop = loop

    def close(self) -> None:
        """The loop goes on; its owner ends it."""
        self._is_closed = True


async def _end(close: Callable[[], None]) -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    close()
    for _ in range(3):  # connections that were aborted are told so in the next turns of the loop
        await asyncio.sleep(0)


def waited(future: Future[Result]) -> Result:
    """What a future gives to a thread; an interrupted wait cancels the work."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class _Bridged(Protocol):
    _bridge: Bridge


Owner = TypeVar("Owner", bound=_Bridged)


def both(
    work: Callable[Concatenate[Owner, Arguments], Coroutine[Any, Any, Result]],
) -> tuple[
    Callable[Concatenate[Owner, Arguments], Result],
    Callable[Concatenate[Owner, Arguments], Coroutine[Any, Any, Result]],
]:
    """The method that blocks and the one that is awaited, made from a coroutine that runs in the client's loop."""

    def call(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._bridge.wait(work(self, *args, **kwargs))

    return named(call, work, ""), awaited(work)


def awaited(
    work: Callable[Concatenate[Owner, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Owner, Arguments], Coroutine[Any, Any, Result]]:
    """The method that is awaited alone, where a property blocks."""

    async def call(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return await asyncio.wrap_future(self._bridge.start(work(self, *args, **kwargs)))

    return named(call, work, "_async")


Made = TypeVar("Made", bound=Callable[..., object])


def named(made: Made, work: Callable[..., object], suffix: str, returns: str | None = None) -> Made:
    """Gives what was made from `_work` its name, parameters and docstring, and what it `returns` where that differs."""
    name = work.__name__.removeprefix("_")
    functools.update_wrapper(made, work)
    made.__name__ = name + suffix
    made.__qualname__ = work.__qualname__.replace(work.__name__, name + suffix)
    signature = inspect.signature(work)
    if returns is not None:
        signature = signature.replace(return_annotation=returns)
        made.__annotations__ = {**made.__annotations__, "return": returns}
    made.__signature__ = signature  # type: ignore[attr-defined]
    if suffix:
        made.__doc__ = f"Like `{name}`, without blocking the event loop."
    return made

"""Whether an engine may be used: it is open, or closed, or has failed, or has lost its store to another node.

Invariants
- It knows the parts of an engine and not the engine: what runs beside asks here, and keeps no engine alive that its
  user has dropped.
- The first failure is the one that is told, by every call, until the engine is opened again.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.engine.core import Core
from tidelog.errors import ClosedError, LogFailedError


class Standing:
    """How an engine stands. Any thread may ask; `check_not_fenced` raises FencedError when another node owns it."""

    def __init__(self, core: Core, check_not_fenced: Callable[[], None]) -> None:
        self._core = core
        self._check_not_fenced = check_not_fenced
        self._failure: str | None = None
        self.is_closed = False

    @property
    def has_failed(self) -> bool:
        """Whether only opening again helps."""
        return self._failure is not None

    def check(self) -> None:
        """Raises when the engine cannot be used."""
        if self.is_closed:
            raise self.closed_error()
        self._check_not_fenced()
        if self._failure is not None:
            raise LogFailedError(self._failure, path=self._core.directory, hint="Close it and open it again")

    def fail(self, error: BaseException) -> None:
        """Pages and log do not belong together any more: nothing is made durable from here on."""
        if self._failure is None:
            self._failure = f"the engine failed and must be opened again: {error}"
            self._core.fail()

    def closed_error(self) -> ClosedError:
        """What whoever uses a closed engine is told."""
        return ClosedError("the engine is closed", path=self._core.directory, hint="Open it again")

    def __str__(self) -> str:
        if self.is_closed:
            return "closed"
        return "open" if self._failure is None else "failed"

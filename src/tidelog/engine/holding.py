"""What an open engine holds (its directory, its threads), and how it is given back, also by one that was forgotten.

Invariants
- It knows the parts and not the engine, so that an engine that nobody has any more is noticed: then it is told, as a
  ResourceWarning and in the log, and everything is given back, without a last checkpoint.
- A dropped engine may be noticed in the middle of anything, in a thread that has one of its own locks. So another
  thread gives back, and it is waited for only as long as nobody minds.
- A forked child gives back nothing: it is all its parent's.
"""

from __future__ import annotations

import _thread
import logging
import os
import warnings
from threading import Event

from tidelog.engine.compaction_calls import Compaction
from tidelog.engine.core import Core
from tidelog.engine.engine_tasks import TaskThreads
from tidelog.engine.standing import Standing
from tidelog.engine.transaction import Transactions
from tidelog.engine.upkeep import Upkeep

_logger = logging.getLogger("tidelog.engine")
_PATIENCE_SECONDS = 2.0


class Holding:
    """The parts of an open engine that must be ended."""

    def __init__(
        self,
        core: Core,
        standing: Standing,
        upkeep: Upkeep,
        compaction: Compaction,
        transactions: Transactions,
        tasks: TaskThreads,
    ) -> None:
        self._core = core
        self._standing = standing
        self._upkeep = upkeep
        self._compaction = compaction
        self._transactions = transactions
        self._tasks = tasks
        self._process_id = os.getpid()

    def stop(self) -> None:
        """Ends what runs beside, and tells those who wait for locks. Waits a few seconds at most."""
        self._standing.is_closed = True
        self._transactions.close()
        self._compaction.stop()
        self._upkeep.stop()

    def give_back(self) -> None:
        """Lets go of the threads for tasks, and of the directory."""
        self._tasks.close()
        with self._core.applying:
            self._core.close()

    def on_dropped(self) -> None:
        """The engine is gone, and nobody has closed it."""
        if self._process_id != os.getpid():
            return
        self._give_back_aside()
        text = f"the engine in {self._core.directory} was dropped without being closed"
        _logger.warning("%s: no last checkpoint was made; use `with`, or call close()", text)
        warnings.warn(text, ResourceWarning, stacklevel=3)

    def _give_back_aside(self) -> None:
        done = Event()
        try:
            # Not a `Thread`: starting one takes locks of `threading` that the interrupted code may hold.
            _thread.start_new_thread(self._end, (done,))
        except RuntimeError:
            return  # the interpreter ends, and the logs are closed by their own ways
        done.wait(_PATIENCE_SECONDS)

    def _end(self, done: Event) -> None:
        try:
            self.stop()
            self.give_back()
        except BaseException as error:  # noqa: BLE001 - a thread that nobody waits for has nobody else to tell
            _logger.warning("%s: was not given back as it should be: %s", self._core.directory, error)
        finally:
            done.set()

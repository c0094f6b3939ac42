"""Tells whether this process has been asleep: stopped, suspended with its machine, or starved.

A process that was stopped while its topic moved to another node must not accept anything before it has asked who owns
the topic. It cannot know by itself that it was stopped; but a thread that ticks can be seen to have missed its ticks.
"""

from __future__ import annotations

import os
import time
from threading import Lock, Thread

from tidelog.limits import start_thread

TICK_SECONDS = 0.1
ASLEEP_SECONDS = 0.4

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the latter stands still while a machine is suspended


def now() -> float:
    """Seconds that go on while the process, or the machine, sleeps."""
    return time.clock_gettime(_CLOCK)


class Pulse:
    """`last` is the last tick, `sleeps` how often ticks were missed. One thread ticks for the whole process."""

    def __init__(self) -> None:
        self.last = now()
        self.sleeps = 0
        self._started_in: int | None = None
        self._starting = Lock()

    def start(self) -> None:
        """Begins to tick in this process, once."""
        with self._starting:
            if self._started_in != os.getpid():
                self.last = now()
                start_thread(Thread(target=self._tick, name="tidelog-pulse", daemon=True))
                self._started_in = os.getpid()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            tick = now()
            if tick - self.last > ASLEEP_SECONDS:
                self.sleeps += 1  # before `last`: who looks at both must see one of them
            self.last = tick


pulse = Pulse()
"""This process's."""

"""Whether an owner may go on appending: it was awake all the time, or it has asked again who owns the topic.

Between two such questions an owner that was replaced without having slept may still accept messages; it ships none of
them, and they are kept for a rescue. While the store is out of reach nobody can tell, and appending goes on after some
seconds: what is accepted is on this disk, and whoever took over in the meantime has a higher epoch. The question stays
open, and its answer counts when it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

from tidelog.errors import FencedError, TidelogError
from tidelog.tier.background import in_thread
from tidelog.tier.pulse import ASLEEP_SECONDS, now, pulse

_PATIENCE_SECONDS = 5.0


class Wakefulness:
    """`verify` asks the store, and raises FencedError when the topic has another owner."""

    def __init__(self, verify: Callable[[], None]) -> None:
        pulse.start()
        self._verify = verify
        self._sleeps = pulse.sleeps
        self._verified_at = now()
        self._asking = Lock()
        self._question: Future[None] | None = None
        self._asked_at = 0.0

    @property
    def is_in_doubt(self) -> bool:
        """Whether the process may have been asleep: `check` may then wait for the store."""
        return pulse.sleeps != self._sleeps or now() - pulse.last > ASLEEP_SECONDS

    def check(self) -> None:
        """Cheap while the process is awake; asks the store when it was not."""
        if pulse.sleeps != self._sleeps or now() - pulse.last > ASLEEP_SECONDS:
            self._ask()

    def _ask(self) -> None:
        sleeps, moment = pulse.sleeps, now()
        if sleeps == self._sleeps and moment - self._verified_at <= ASLEEP_SECONDS:
            return  # the ticking thread is late, and it was asked just now
        with self._asking:
            question = self._question
            if question is None or question.done():
                question = self._question = in_thread(self._verify, "tidelog-awake")
                self._asked_at = moment
            patience_seconds = self._asked_at + _PATIENCE_SECONDS - moment
        try:
            # One question for all threads, and none of them goes on before its answer while there is hope for one.
            question.result(max(0.0, patience_seconds))
        except FencedError:
            raise
        except (TidelogError, TimeoutError):
            pass  # out of reach, or keys that expired while it slept: nobody can tell
        self._sleeps, self._verified_at = sleeps, now()

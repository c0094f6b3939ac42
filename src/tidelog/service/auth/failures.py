"""Failed authentications are answered late, and too many of them not at all, so that passwords cannot be tried out.

Invariants
- One address may be wrong about one name once a second in the long run, and twenty times a second in all; each failure
  beyond that waits until it is due.
- Whoever is more than ten seconds ahead is refused without a look at the proof, right or wrong: that is what bounds
  the guesses. Others, at other addresses or with other names, notice nothing.
- A token cannot be guessed, so a wrong one is answered late and blocks nobody: many clients may share an address, as
  those behind a proxy do.
- Success waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

_SECONDS_A_NAME = 1.0
_SECONDS_AN_ADDRESS = 0.05
_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 10.0
_LONGEST_TOKEN_SECONDS = 1.0
_TOKENS = "\n"  # no user is called so
_KEPT = 20_000


class Failures:
    """Counts what was wrong, by address and name."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is a monotonic time in seconds."""
        self._now = now
        self._even_at: dict[tuple[str, str | None], float] = {}

    def is_blocked(self, client: str, name: str) -> bool:
        """Whether the proof is not even looked at."""
        now = self._now()
        keys = (client, name), (client, None)
        return any(self._even_at.get(key, 0.0) - now > _LONGEST_SECONDS for key in keys)

    def failed(self, client: str, name: str) -> float:
        """Counts a failure; returns the seconds after which it is answered."""
        now = self._now()
        self._forget_old()
        waits = [
            self._count((client, name), _SECONDS_A_NAME, now),
            self._count((client, None), _SECONDS_AN_ADDRESS, now),
        ]
        return min(max(*waits, _FIRST_SECONDS), _LONGEST_SECONDS)

    def token_failed(self, client: str) -> float:
        """Counts a wrong token; returns the seconds after which it is answered."""
        self._forget_old()
        wait = self._count((client, _TOKENS), _SECONDS_AN_ADDRESS, self._now())
        return min(max(wait, _FIRST_SECONDS), _LONGEST_TOKEN_SECONDS)

    def _forget_old(self) -> None:
        if len(self._even_at) >= _KEPT:
            now = self._now()
            self._even_at = {key: at for key, at in self._even_at.items() if at > now}

    def _count(self, key: tuple[str, str | None], seconds: float, now: float) -> float:
        before = max(self._even_at.get(key, 0.0), now)
        self._even_at[key] = before + seconds
        return before - now

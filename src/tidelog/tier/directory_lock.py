"""One writer at a time in a shared directory, and a time for each of its writes that no other write has.

    <directory>/.lock#0    ASCII digits: the last time that was given out, in microseconds since 1970

No key has such a name, and no listing shows it.

Invariants
- Whoever holds the lock is alone among all threads and processes that open the same directory. The system frees it when
  its holder dies. A holder that is only paused keeps it: the others give up after a while and are told to retry.
- Times only grow. A file's etag is made of its inode, time and size, and inodes and sizes come back: the time must not.
- It rests on flock. On file systems of one machine that works. Over NFS it works where the lock goes to the server: v4,
  or v3 with its lock daemon, and not mounted with `nolock` or `local_lock`. Where flock is refused, writing is refused.
- Two directories have two locks: a store inside another one's directory does not know of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from tidelog.errors import StoreUnavailableError
from tidelog.files import open_regular

LOCK_NAME = ".lock#0"
LOCK_TIMEOUT_SECONDS = 30.0
_POLL_SECONDS = 0.0005
_MAX_POLL_SECONDS = 0.02
_MAX_DIGITS = 20
# A time further ahead is not followed: some clock was wrong once, and is not to date all objects from then on.
_MAX_AHEAD_US = 24 * 3600 * 1_000_000


class HeldLock:
    """What only the holder of the lock may do."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def new_time_us(self, after_us: int = 0) -> int:
        """A time behind all that were given out before and behind `after_us`; now, unless the clock went back."""
        now_us = time.time_ns() // 1000
        last_us = self._last_us()
        if last_us > now_us + _MAX_AHEAD_US:
            last_us = 0
        new_us = max(now_us, last_us + 1, after_us + 1)
        os.pwrite(self._descriptor, b"%020d" % new_us, 0)
        return new_us

    def _last_us(self) -> int:
        """Only a hint against clocks that stand still or go back, so what cannot be read counts as nothing."""
        text = os.pread(self._descriptor, _MAX_DIGITS, 0)
        return int(text) if text.isdigit() else 0


class DirectoryLock:
    """The lock of one directory; not reentrant."""

    def __init__(self, directory: Path, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> None:
        self._path = directory / LOCK_NAME
        self._timeout_seconds = timeout_seconds

    @contextlib.contextmanager
    def held(self) -> Iterator[HeldLock]:
        """Waits for its turn. StoreUnavailableError when that takes too long; nothing was done then."""
        deadline = time.monotonic() + self._timeout_seconds
        descriptor = self._acquire(deadline)
        try:
            yield HeldLock(descriptor)
        finally:
            # A process that is just being started may hold a copy of the descriptor, so closing alone is not enough.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _acquire(self, deadline: float) -> int:
        while True:
            # Everybody who may write here has to be able to open it for writing: the umask decides, as for the others.
            descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._wait(descriptor, deadline)
                if self._is_current(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _wait(self, descriptor: int, deadline: float) -> None:
        """Asks again and again: a call that waits could not be given up when the holder is paused."""
        pause_seconds = _POLL_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            else:
                return
            if time.monotonic() > deadline:
                message = f"{self._path}: another process has held the lock for {self._timeout_seconds:g} s"
                raise StoreUnavailableError(message, operation="lock", hint="Is it stopped? `fuser` tells which it is")
            time.sleep(pause_seconds * random.uniform(0.5, 1.0))
            pause_seconds = min(pause_seconds * 2, _MAX_POLL_SECONDS)

    def _is_current(self, descriptor: int) -> bool:
        """A lock on a file that somebody removed locks nobody out."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

"""A node's lease: the heartbeat that keeps other nodes from taking its topics, or its engine, by accident.

    {root}/storage/nodes/{node}/{session}    who it is, where it runs, when it last renewed the heartbeat

A node is an open log directory or an open engine. Each opening is a session, with a random name. The node has one
heartbeat for all its topics, and an owner document names the session that holds the topic.

What a lease is for, and what it is not
Epochs alone make tidelog safe: an owner that was replaced can publish, delete and move nothing, whatever the clocks of
the machines say and however long it slept (`ownership.py`). But epochs let any node take anything at any time. A lease
prevents the accident: opening a topic that a live node holds raises HeldError, unless the caller passes `take_over`.
Nothing else depends on it. A wrong clock, a lost heartbeat or a race between two openings therefore costs at worst what
a takeover costs: one owner stops with FencedError, and keeps its unshipped tail for a rescue.

Invariants
- The heartbeat is in the store before an owner document names its session: no topic looks free while it is claimed.
- A topic is held as long as its owner document names a session with a live heartbeat. Where the metadata store has
  leases (etcd), that is as long as the entry exists. Elsewhere the entry carries the time and the length of the lease,
  and the clock of the observer decides: clocks have to agree to within a lease.
- A heartbeat of this node, from the same directory of the same machine since it was started, is dead: this process
  holds the lock of that directory. One from elsewhere belongs to a copy of the directory, and is another node's.
- A heartbeat that cannot be renewed stops nothing here: appended messages are on this disk. But another node may open
  the topics once the lease has expired, and then this one is fenced.
- Closing removes the heartbeat. A process that dies leaves it to expire; the next opening of the directory removes it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import socket
from pathlib import Path
from threading import Lock

import msgspec

from tidelog.clock import Clock
from tidelog.codec import JSON_ERRORS, from_json
from tidelog.cold.catalog import Owner
from tidelog.errors import ClosedError, DataError, HeldError, Hint, LeaseLostError, TidelogError
from tidelog.store.document import encode_json
from tidelog.store.keys import DEFAULT_ROOT, node_key, node_prefix
from tidelog.store.metadata.base import Lease, MetadataStore, Put
from tidelog.store.scheduler import Background, Task

_logger = logging.getLogger("tidelog.cold")
DEFAULT_LEASE_SECONDS = 10.0
TAKE_OVER_HINT = (
    "Close it there, or wait until the lease has run out. To take it away from there on purpose: take_over=True, or "
    "--take-over on the command line"
)
_HEARTBEATS_A_LEASE = 3
_US = 1_000_000


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The heartbeat of a session: its node, its location, and when it was last renewed."""

    node: str
    session: str
    host: str
    boot: str
    directory: str
    pid: int
    started_us: int
    renewed_us: int
    lease_seconds: float

    def age_seconds(self, now_us: int) -> float:
        """How long ago it was renewed, by the caller's clock; 0 where that clock is behind."""
        return max(0.0, (now_us - self.renewed_us) / _US)


class NodeLease:
    """The lease of one node. Its first claim begins the heartbeat, its end removes it. Threads may share it."""

    def __init__(
        self,
        metadata: MetadataStore,
        clock: Clock,
        node: str,
        directory: Path,
        *,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        root: str = DEFAULT_ROOT,
        renews_itself: bool = True,
        ending: Background | None = None,
    ) -> None:
        """`ending` is what the node's other parts end with: their patience with a store is this one's too."""
        self.node = node
        self.node_name = ""
        """What a cluster calls this node; set before the first claim."""
        self.session = secrets.token_hex(8)
        self._metadata = metadata
        self._clock = clock
        self._root = root
        self._renews_itself = renews_itself
        self._first = Heartbeat(
            node=node,
            session=self.session,
            host=socket.gethostname(),
            boot=boot_id(),
            directory=str(directory),
            pid=os.getpid(),
            started_us=clock.now_us(),
            renewed_us=clock.now_us(),
            lease_seconds=lease_seconds,
        )
        self._dead_sessions: dict[str, float] = {}
        self._renewing = Lock()
        self._renewed_at: float | None = None
        self._lease: Lease | None = None
        self._is_late = False
        self._is_over = False
        # A thread of its own: neither uploads nor the questions of many topics keep the heartbeat from being in time.
        self._background = Background(1, "tidelog-lease")
        self._ending = ending or self._background
        self._task: Task | None = None

    @property
    def _pause_seconds(self) -> float:
        return self._first.lease_seconds / _HEARTBEATS_A_LEASE

    # This node

    def follow(self, lease_seconds: float) -> None:
        """Before the first claim: counts for no longer than this, and is renewed (`renew`) by the caller alone."""
        seconds = min(lease_seconds, self._first.lease_seconds)
        self._first = msgspec.structs.replace(self._first, lease_seconds=seconds)
        self._renews_itself = False

    def hold(self) -> None:
        """Before a claim: from here on others can see that this node lives. Raises what the store raises."""
        with self._renewing:
            if self._is_over:
                raise ClosedError("the node is closed", path=self._first.directory)
            now = self._clock.monotonic()
            if self._renewed_at is None:
                self._remove_dead_sessions()
            if self._renewed_at is None or now - self._renewed_at >= self._pause_seconds:
                self._renew()
            if self._renews_itself and self._task is None:
                self._task = self._background.add(self._renew_now_and_then, self._pause_seconds)

    def renew(self) -> None:
        """Gives a sign of life now, if there was one before."""
        with self._renewing:
            if self._renewed_at is not None and not self._is_over:
                self._renew()

    def release(self) -> None:
        """The node closes: what it held is free at once, or when the lease has run out. Twice is fine."""
        if self._is_over:
            return
        self._is_over = True
        self._background.close()
        if self._renewed_at is not None:
            with contextlib.suppress(TidelogError):  # out of reach: it runs out by itself
                self._ending.attempt(self._remove)

    def _renew_now_and_then(self) -> float:
        """Measured from the start of one renewal to the start of the next: a renewal that a slow store delayed is as
        old as its request, so that the node would seem dead during a pause after it."""
        begin = self._clock.monotonic()
        try:
            self.renew()
        except TidelogError as error:
            if not self._is_late:
                seconds = self._first.lease_seconds
                _logger.warning(
                    "%s: the heartbeat of %s was not written, and is tried again; if that fails for %g s, another node "
                    "may open what this one holds: %s",
                    self._first.directory,
                    self.node,
                    seconds,
                    error,
                )
            self._is_late = True
        else:
            if self._is_late:
                _logger.warning("%s: the heartbeat of %s is written again", self._first.directory, self.node)
            self._is_late = False
        return max(0.0, self._pause_seconds - (self._clock.monotonic() - begin))

    def _renew(self) -> None:
        asked_at = self._clock.monotonic()
        document = encode_json(msgspec.structs.replace(self._first, renewed_us=self._clock.now_us()))
        key = node_key(self.node, self.session, self._root)
        if self._metadata.supports_leases:
            self._renew_lease(key, document)
        else:
            self._metadata.put(key, document)
        self._renewed_at = asked_at

    def _renew_lease(self, key: str, document: bytes) -> None:
        """The lease keeps the entry alive; it is written again for the time in it."""
        try:
            if self._lease is not None:
                self._lease.refresh()
                self._metadata.commit([], [Put(key, document, self._lease)])
                return
        except LeaseLostError:
            self._lease = None  # the process slept, or the store was out of reach for too long
        self._lease = self._metadata.lease(math.ceil(self._first.lease_seconds))
        self._metadata.commit([], [Put(key, document, self._lease)])

    def _remove(self) -> None:
        with self._renewing:  # after a heartbeat in progress
            self._metadata.delete(node_key(self.node, self.session, self._root))
            if self._lease is not None:
                self._lease.revoke()

    def _remove_dead_sessions(self) -> None:
        """What earlier openings of this directory have left when they died."""
        for entry in self._metadata.range(node_prefix(self.node, self._root)):
            with contextlib.suppress(DataError):  # of what cannot be understood nobody can tell
                if self._is_dead(_decoded(entry.value, entry.key)):
                    self._metadata.delete(entry.key)

    # Other nodes

    def holder(self, owner: Owner) -> Heartbeat | None:
        """The living session that holds what this is the owner document of; None where that is free, or our own."""
        if owner.session in ("", self.session) or self._was_dead(owner):
            return None
        entry = self._metadata.get(node_key(owner.node, owner.session, self._root))
        found = None if entry is None else _decoded(entry.value, entry.key)
        if found is not None and not self._is_dead(found):
            return found
        if owner.node == self.node:
            self._dead_sessions[owner.session] = self._clock.monotonic()
        return None

    def is_alive(self, node: str, session: str) -> bool:
        """Whether a session has a heartbeat that counts."""
        entry = self._metadata.get(node_key(node, session, self._root))
        return entry is not None and not self._is_dead(_decoded(entry.value, entry.key))

    def _was_dead(self, owner: Owner) -> bool:
        """A node that is opened again finds its last session in every topic: it asks for that one now and then."""
        seen_at = self._dead_sessions.get(owner.session)
        return seen_at is not None and self._clock.monotonic() - seen_at < self._pause_seconds

    def refuse_held(self, owner: Owner, noun: str, path: Path) -> None:
        """HeldError where a living node holds it."""
        found = self.holder(owner)
        if found is not None:
            raise held_error(found, noun, path, self._clock, owner.who)

    def _is_dead(self, found: Heartbeat) -> bool:
        if _place(found) == _place(self._first):
            return found.session != self.session
        has_run_out = found.age_seconds(self._clock.now_us()) >= found.lease_seconds
        return has_run_out and not self._metadata.supports_leases


def _place(found: Heartbeat) -> tuple[str, ...]:
    return found.node, found.host, found.boot, found.directory


def held_error(found: Heartbeat, noun: str, path: Path, clock: Clock, who: str) -> HeldError:
    """Names the holder, its location, and when that node was last heard of."""
    age_seconds = found.age_seconds(clock.now_us())
    return HeldError(
        f"the {noun} is open on {who} (host {found.host}, directory {found.directory}, pid {found.pid}), whose "
        f"last heartbeat is {age_seconds:.1f} s old and counts for {found.lease_seconds:g} s",
        operation="open",
        path=path,
        hint=TAKE_OVER_HINT,
    )


@functools.cache
def boot_id() -> str:
    """Tells one run of a machine from the next; empty where the machine does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _decoded(data: bytes, key: str) -> Heartbeat:
    try:
        return from_json(data, Heartbeat)
    except JSON_ERRORS as error:
        raise DataError(
            f"{key} in the metadata store is no heartbeat: {error}",
            operation="claim",
            hint=Hint(
                "Delete it if that node is closed; take_over=True does not look at it",
                command="Delete it if that node is closed; --take-over does not look at it",
            ),
        ) from error

"""The coordinator slots of a node: of which groups and transactional ids it is the coordinator.

    {root}/storage/slots/{n}    `SlotClaim`: who coordinates the slot, with a number that grows with every claim

Invariants
- Every write of a coordinator checks its claim in the same commit. Once another node has claimed the slot, no write of
  ours succeeds, however long we slept: what the other one has read is what there is.
- A slot is loaded after it was claimed, and answers nothing before it is: COORDINATOR_LOAD_IN_PROGRESS. Requests for
  what is not ours are answered NOT_COORDINATOR.
- A node by itself has no slots: it coordinates everything, and nothing is checked (`None` in place of this).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from tidelog.errors import ConflictError, FencedError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.placement import slot_of
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.keys import slot_key
from tidelog.store.metadata.base import Check, MetadataStore
from tidelog.store.scheduler import in_store_thread

Load = Callable[[frozenset[int]], Awaitable[None]]


class SlotClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Who coordinates a slot."""

    node: str
    epoch: int


class Slots:
    """The slots that this node has claimed. Threads may ask for the checks."""

    def __init__(self, shared: Callable[[], tuple[MetadataStore, str]], node: str, load: Load) -> None:
        """`load` reads what belongs to some slots, once for all that are acquired together."""
        self._shared = shared
        self._node = node
        self._load = load
        self._versions: dict[int, str] = {}
        self._wanted: set[int] = set()
        self._ready: frozenset[int] = frozenset()
        self._unloaded: set[int] = set()
        self._loading: frozenset[int] = frozenset()
        self._loader: asyncio.Task[None] | None = None

    def refusal(self, key: str) -> ErrorCode | None:
        """Why requests of a group or a transactional id are not answered here now."""
        slot = slot_of(key)
        if slot in self._ready:
            return None
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if slot in self._wanted else ErrorCode.NOT_COORDINATOR

    def has(self, key: str) -> bool:
        """Whether a group or a transactional id is coordinated here, now or once its slot is loaded."""
        return slot_of(key) in self._wanted

    def is_claimed(self, key: str) -> bool:
        """Whether something may be written for it under a claim of this node."""
        return slot_of(key) in self._versions

    def is_unloaded(self, key: str) -> bool:
        """Whether its slot is one of those that are being loaded now."""
        return slot_of(key) in self._loading

    def check(self, slot: int) -> Check:
        """What every write for a slot checks; FencedError for one that is not ours."""
        version = self._versions.get(slot)
        if version is None:
            raise _lost(slot)
        _, root = self._shared()
        return Check(slot_key(slot, root), version)

    def conflict(self, slot: int, error: ConflictError) -> FencedError | ConflictError:
        """What a write failed by that checked a slot. One that another node has claimed is not ours any more."""
        try:
            check = self.check(slot)
        except FencedError as lost:
            return lost
        metadata, _ = self._shared()
        found = metadata.get(check.key)
        if found is not None and found.version == check.version:
            return error
        self._versions.pop(slot, None)
        self._ready -= {slot}
        self._wanted.discard(slot)
        return _lost(slot)

    async def acquire(self, slot: int) -> None:
        """Claims a slot and loads it. When that fails the slot is not ours: it may be given to another node now."""
        self._wanted.add(slot)
        try:
            self._versions[slot] = await in_store_thread(self._claim, slot)
            self._unloaded.add(slot)
            while slot in self._unloaded:
                if self._loader is None:
                    self._loader = asyncio.get_running_loop().create_task(self._load_all())
                await asyncio.shield(self._loader)
        except BaseException:
            self.release(slot)
            self.forget(slot)
            raise

    def _claim(self, slot: int) -> str:
        metadata, root = self._shared()
        kind = partial(decode_json, kind=SlotClaim)
        document = VersionedDocument(metadata, slot_key(slot, root), encode_json, kind)
        found = document.read()
        claim = SlotClaim(node=self._node, epoch=1 if found is None else found.value.epoch + 1)
        return document.replace(claim, None if found is None else found.version)

    async def _load_all(self) -> None:
        slots = self._loading = frozenset(self._unloaded)
        try:
            await self._load(slots)
        finally:
            self._loader, self._loading = None, frozenset()
        self._unloaded -= slots
        self._ready |= slots & self._wanted

    def release(self, slot: int) -> None:
        """Answers nothing for a slot any more. What is being written is checked by the claim, until it is `forgotten`.

        The claim stays as it is: the next coordinator makes a new one.
        """
        self._ready -= {slot}
        self._wanted.discard(slot)
        self._unloaded.discard(slot)

    def forget(self, slot: int) -> None:
        """Nothing is written for a slot any more."""
        if slot not in self._wanted:
            self._versions.pop(slot, None)


def _lost(slot: int) -> FencedError:
    return FencedError(f"another node coordinates slot {slot}", hint="Ask for the coordinator again")

"""Where the members of consumer groups are kept, so that a broker that is started again goes on with them.

    {root}/storage/groups/{node}/{group}        `GroupRecord`, as MessagePack: of a node by itself
    {root}/storage/groups/slot-{n}/{group}      the same where several nodes share the groups

Invariants
- Only the node whose groups they are writes them, so that no version is checked but that of its slot (`slots.py`).
- A record that is damaged, or would be too large, is as good as none: its members join again.
- Calls wait for the store: they belong in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal

import msgspec

from tidelog.errors import ConflictError, TidelogError
from tidelog.service.kafka.slots import Slots
from tidelog.service.placement import SLOTS, slot_of
from tidelog.store.keys import group_key, groups_prefix, parse_group_key
from tidelog.store.metadata.base import MAX_VALUE_BYTES, Check, Delete, MetadataStore, Put
from tidelog.store.scheduler import in_parallel

_logger = logging.getLogger("tidelog.kafka")
_WRITES_AT_ONCE = 100  # as many as etcd takes
_READ_AT_ONCE = 8


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """A group: its protocol, since when it has no members (None: it has some), and the snapshot of its members."""

    protocol: Literal["classic", "consumer"]
    protocol_type: str
    emptied_us: int | None
    snapshot: bytes


class GroupStore:
    """The groups of one node."""

    def __init__(self, shared: Callable[[], tuple[MetadataStore, str]], node: str) -> None:
        """`shared` is the metadata store of the installation, and the root of its keys."""
        self._shared = shared
        self._node = node
        self.check: Callable[[], Check] | None = None
        """What every write checks; nothing, where nobody else may write."""
        self.conflict: Callable[[ConflictError], TidelogError] = lambda error: error
        """What it means that this check has failed."""

    def load(self) -> dict[str, GroupRecord]:
        """All groups."""
        found: dict[str, GroupRecord] = {}
        metadata, root = self._shared()
        for entry in metadata.range(groups_prefix(self._node, root)):
            group = parse_group_key(entry.key, self._node, root)
            try:
                record = msgspec.msgpack.decode(entry.value, type=GroupRecord)
            except msgspec.DecodeError as error:
                _logger.warning("%s is damaged, and its members join again: %s", entry.key, error)
                continue
            if group is not None:
                found[group] = record
        return found

    def store(self, changes: Mapping[str, GroupRecord | None]) -> dict[str, TidelogError]:
        """Keeps groups, or forgets them (None); returns those that failed."""
        failed: dict[str, TidelogError] = {}
        metadata, root = self._shared()
        at_once = _WRITES_AT_ONCE if metadata.supports_multi_key else 1
        names = list(changes)
        for first in range(0, len(names), at_once):
            some = names[first : first + at_once]
            try:
                checks = [] if self.check is None else [self.check()]
                metadata.commit(checks, [self._write(name, changes[name], root) for name in some])
            except ConflictError as error:
                failed |= dict.fromkeys(some, self.conflict(error))
            except TidelogError as error:
                failed |= dict.fromkeys(some, error)
        return failed

    def _write(self, group: str, record: GroupRecord | None, root: str) -> Put | Delete:
        key = group_key(group, self._node, root)
        data = None if record is None else msgspec.msgpack.encode(record)
        return Delete(key) if data is None or len(data) > MAX_VALUE_BYTES else Put(key, data)


class SlotGroupStore:
    """The groups of all slots of a node, each written under the claim of its slot."""

    def __init__(self, shared: Callable[[], tuple[MetadataStore, str]], slots: Slots) -> None:
        self._stores = [GroupStore(shared, f"slot-{slot}") for slot in range(SLOTS)]
        for slot, store in enumerate(self._stores):
            store.check, store.conflict = partial(slots.check, slot), partial(slots.conflict, slot)

    def load(self) -> dict[str, GroupRecord]:
        """Nothing: slots are loaded when they are acquired."""
        return {}

    def load_slots(self, slots: Iterable[int]) -> dict[str, GroupRecord]:
        """The groups of some slots."""
        found = in_parallel(lambda slot: self._stores[slot].load(), sorted(slots), _READ_AT_ONCE, "tidelog-groups")
        return {group: record for some in found for group, record in some.items()}

    def store(self, changes: Mapping[str, GroupRecord | None]) -> dict[str, TidelogError]:
        """As `GroupStore.store`."""
        by_slot: dict[int, dict[str, GroupRecord | None]] = {}
        for group, record in changes.items():
            by_slot.setdefault(slot_of(group), {})[group] = record
        failed: dict[str, TidelogError] = {}
        for slot, some in by_slot.items():
            try:
                failed |= self._stores[slot].store(some)
            except TidelogError as error:  # the slot is not ours any more
                failed |= dict.fromkeys(some, error)
        return failed

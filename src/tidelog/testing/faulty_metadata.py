"""A metadata store in memory that dies and fails where a test says so.

Invariants
- It keeps the contract of `tidelog.tier.metadata.MetadataStore` (one suite runs over this and the real ones).
- A commit is one numbered call, whatever it changes: all of it is done or none. `put` and `delete` are commits.
- With `multi_key=False` it can what a bucket can: one key at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NoReturn, Self, get_args

from tidelog.errors import InputError
from tidelog.testing.faults import Call, Faults
from tidelog.testing.remote import Client, OnRequest, Server
from tidelog.testing.store_failures import STORE_FAULTS, StoreFailure
from tidelog.tier.keys import check_key, check_prefix, is_node_key
from tidelog.tier.metadata.memory import MemoryMetadataStore
from tidelog.tier.metadata.store import Check, Delete, Entry, MetadataStore, Put, Write

MetadataRequest = Literal["get", "range", "keys", "floor", "commit"]


class Entries(MemoryMetadataStore):
    """What the faulty store holds: a memory store that can be copied."""

    def copy(self) -> Entries:
        """The entries themselves are shared: they never change."""
        fresh = Entries()
        with self._guard:
            fresh._entries = dict(self._entries)
            fresh._last_version = self._last_version
        return fresh

    def image(self) -> object:
        """Equal for two that show the same, versions included."""
        with self._guard:
            return dict(self._entries)


class FaultyMetadata(Client[Entries], MetadataStore):
    """A metadata store in memory. Give it to the product in place of a real one.

    crash_at    the changing call with this number (from 1) raises Crash; `after_crash` has it done or not done
    on_call     called with every changing call before it takes effect, on the calling thread
    faults      in place of those two: what is shared with a disk or a store, so that their calls have one numbering
    on_request  called with (operation, keys) of every request, reading ones too; it may wait, or raise
    multi_key   whether one commit may name several keys
    """

    url = "memory://"
    supports_leases = False
    operations = frozenset(get_args(MetadataRequest))
    reading_operations = frozenset({"get", "range", "floor"})
    possible_faults = frozenset(STORE_FAULTS) - {"not_found"}

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        on_call: Callable[[Call], None] | None = None,
        faults: Faults | None = None,
        on_request: OnRequest | None = None,
        multi_key: bool = True,
    ) -> None:
        shared = faults or Faults(crash_at=crash_at, on_call=on_call)
        super().__init__(Server(Entries()), shared.sharing("metadata"), on_request)
        self._multi_key = multi_key

    @property
    def supports_multi_key(self) -> bool:
        return self._multi_key

    @property
    def floor_is_cheap(self) -> bool:
        return self._multi_key

    def contents(self) -> dict[str, bytes]:
        """Every key with its value. Also in a dead process."""
        return self._read(lambda held: {entry.key: entry.value for entry in held.range("")})

    def end_leases(self) -> None:
        """The heartbeats of all nodes have run out. No call is counted, and none fails."""
        writes = [Delete(key) for key in self.contents() if is_node_key(key)]
        self._read(lambda held: held.commit([], writes))

    def get(self, key: str) -> Entry | None:
        failure = self._look("get", check_key(key))
        return self._one(self._read(lambda held: held.get(key)), failure)

    def floor(self, prefix: str, key: str) -> Entry | None:
        check_prefix(prefix)
        failure = self._look("floor", check_key(key))
        return self._one(self._read(lambda held: held.floor(prefix, key)), failure)

    def close(self) -> None:
        """Nothing to give back."""

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        failure = self._look("range", prefix)
        return self._arrived(self._read(lambda held: held.range(prefix, start=start, limit=limit)), failure)

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        self._look("keys", prefix)
        return self._read(lambda held: held.keys(prefix, start=start, limit=limit))

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        # Who goes on using these lists must not change what is done late.
        checked, written = list(checks), list(writes)
        place = ",".join(dict.fromkeys(change.key for change in (*written, *checked)))
        sent_bytes = sum(len(write.value) for write in written if isinstance(write, Put))
        self._request("commit", place, bytes_written=sent_bytes)
        return self._change("commit", place, lambda held: held.commit(checked, written))

    def _one(self, entry: Entry | None, failure: StoreFailure | None) -> Entry | None:
        return None if entry is None else self._arrived([entry], failure)[0]

    def _arrived(self, entries: Iterable[Entry], failure: StoreFailure | None) -> list[Entry]:
        found = [entry._replace(value=failure.damaged(entry.value)) if failure else entry for entry in entries]
        self._meter.answered(sum(len(entry.value) for entry in found))
        return found

    def _connected_to(self, server: Server[Entries], faults: Faults) -> Self:
        fresh = type(self)(faults=faults, multi_key=self._multi_key)
        fresh._server = server
        return fresh

    def __reduce__(self) -> NoReturn:
        raise InputError(f"{self.url} lives in this process alone and cannot be pickled")

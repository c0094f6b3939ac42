"""A metadata store in etcd, for clusters.

Invariants
- A version is the revision of etcd that wrote the key. Revisions only grow, so no version is reused.
- A commit is one transaction of etcd, however many keys it names.
- Values are stamped (`base.py`). A request without an answer is undecided: the stamp is searched for before the write
  is retried, so that a write that was done is not reported as a conflict with itself.
- A range of many pages is read at one revision: it is a snapshot.
- All of this holds over all members of a cluster: reads are linearizable, whichever member answers (`etcd_client.py`).
- What threads ask at the same time goes together (`etcd_batches.py`); what keeps a lease alive goes alone.
- Only the caller's keys are accessed: a user may be restricted to those below one prefix.
"""

from __future__ import annotations

import contextlib
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tidelog.clock import Clock, SystemClock
from tidelog.errors import ConflictError, LeaseLostError
from tidelog.store.keys import check_key, check_prefix
from tidelog.store.metadata import base as stamp
from tidelog.store.metadata.base import (
    Check,
    Delete,
    Entry,
    Lease,
    MetadataStore,
    Put,
    Write,
    end_of,
    numeric_version,
    settle,
)
from tidelog.store.metadata.etcd_batches import Batches
from tidelog.store.metadata.etcd_client import Endpoint, EtcdClient
from tidelog.store.metadata.watch import Changes, Watch
from tidelog.store.settings import MetadataSettings

REQUEST_TIMEOUT_SECONDS = 5.0
_PAGE_ENTRIES = 200
_SILENCE_SECONDS = 2.0
_RANGES_AT_ONCE = 50
_KEYS_AT_ONCE = 100  # etcd takes 128 operations in one transaction, unless it was told otherwise


class EtcdMetadataStore(MetadataStore):
    """Nothing is asked of the server until it is needed."""

    supports_multi_key = True
    supports_leases = True
    reads_many_at_once = True
    floor_is_cheap = False  # the server gathers everything in the range before it sorts

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        settings: MetadataSettings | None = None,
        *,
        is_tls: bool = False,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._client = EtcdClient(
            endpoints, settings or MetadataSettings(), is_tls=is_tls, timeout_seconds=timeout_seconds
        )
        self.url = self._client.url
        self._clock = clock or SystemClock()
        self._asked_key = "\0"
        self._reads = Batches(lambda question: self._client.ask("kv/txn", question), are_reads=True)
        self._writes = Batches(lambda question: self._client.ask("kv/txn", question, is_write=True))

    def get(self, key: str) -> Entry | None:
        return self.get_many([key]).get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            some = [_encoded(check_key(key)) for key in keys[first : first + _KEYS_AT_ONCE]]
            self._asked_key = keys[first]
            questions = [{"request_range": {"key": key}} for key in some]
            answer = self._reads.ask({"compare": [], "success": questions, "failure": []})
            for response in answer.get("responses", []):
                for entry in map(_entry, response.get("response_range", {}).get("kvs", [])):
                    found[entry.key] = entry
        return found

    def range_many(self, prefixes: Sequence[str]) -> list[list[Entry]]:
        found: list[list[Entry]] = []
        for first in range(0, len(prefixes), _RANGES_AT_ONCE):
            some = prefixes[first : first + _RANGES_AT_ONCE]
            reads = [
                {"key": _encoded(check_prefix(one)), "range_end": _encoded(end_of(one)), "limit": _PAGE_ENTRIES}
                for one in some
            ]
            question = {"compare": [], "success": [{"request_range": read} for read in reads], "failure": []}
            responses = self._reads.ask(question)["responses"]
            for prefix, response in zip(some, responses, strict=True):
                entries = [_entry(one) for one in response["response_range"].get("kvs", [])]
                found.append(entries if len(entries) < _PAGE_ENTRIES else self.range(prefix))
        return found

    def change_mark(self) -> object | None:
        """The revision of the whole store: one small request, about a key that somebody has asked for before."""
        answer = self._client.ask("kv/range", {"key": _encoded(self._asked_key), "limit": 1, "keys_only": True})
        return int(answer["header"]["revision"])

    def watch(self, prefix: str) -> Watch:
        return _EtcdWatch(self._client, check_prefix(prefix), self.snapshot)

    def snapshot(self, prefix: str) -> tuple[int, list[Entry]]:
        """Everything below a prefix, and the revision of which it is."""
        answer = self._client.ask("kv/range", {"key": _encoded(prefix), "limit": 1, "keys_only": True})
        revision = int(answer["header"]["revision"])
        found = self._pages(prefix, prefix, None, keys_only=False, revision=revision)
        return revision, [_entry(one) for one in found]

    def floor(self, prefix: str, key: str) -> Entry | None:
        question = {
            "key": _encoded(check_prefix(prefix) or "\0"),
            "range_end": _encoded(min(check_key(key) + "\0", end_of(prefix))),
            "limit": 1,
            "sort_order": "DESCEND",
            "sort_target": "KEY",
        }
        found = self._read(question) if prefix <= key else []
        return _entry(found[0]) if found else None

    def close(self) -> None:
        self._client.close()

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        return [_entry(found) for found in self._pages(prefix, start, limit, keys_only=False)]

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        return [_decoded(found["key"]).decode("ascii") for found in self._pages(prefix, start, limit, keys_only=True)]

    def _pages(
        self, prefix: str, start: str, limit: int | None, *, keys_only: bool, revision: int = 0
    ) -> Iterator[dict[str, Any]]:
        first, left = start or "\0", limit
        while left is None or left > 0:
            size = _PAGE_ENTRIES if left is None else min(left, _PAGE_ENTRIES)
            question = {"key": _encoded(first), "range_end": _encoded(end_of(prefix)), "limit": size}
            question |= {"revision": revision, "keys_only": keys_only}
            answer = self._reads.ask({"compare": [], "success": [{"request_range": question}], "failure": []})
            found = answer["responses"][0]["response_range"].get("kvs", [])
            yield from found
            if len(found) < size:
                return
            revision = revision or int(answer["header"]["revision"])
            first = _decoded(found[-1]["key"]).decode("ascii") + "\0"
            left = None if left is None else left - len(found)

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        write_id = stamp.new_write_id()
        transaction = {
            "compare": [_compare(check) for check in checks],
            "success": [_request(write, write_id) for write in writes],
            "failure": [],
        }
        puts = [write.key for write in writes if isinstance(write, Put)]
        if any(isinstance(write, Put) and write.lease is not None for write in writes):
            ask = partial(self._client.ask, "kv/txn", transaction, is_write=True)  # a heartbeat waits for no other
        else:
            checked, written = frozenset(one.key for one in checks), frozenset(one.key for one in writes)
            size = sum(len(write.value) for write in writes if isinstance(write, Put))
            ask = partial(self._writes.ask, transaction, checked, written, size)
        return settle(lambda: self._transact(ask, puts), lambda: self._landed(write_id, puts))

    def _transact(self, ask: Callable[[], dict[str, Any]], puts: list[str]) -> dict[str, str]:
        answer = ask()
        if not answer.get("succeeded", False):
            raise ConflictError("a key was changed concurrently", hint="Read it again, then decide whether to write")
        return dict.fromkeys(puts, str(int(answer["header"]["revision"])))

    def _landed(self, write_id: str, puts: list[str]) -> dict[str, str] | None:
        """One key with our stamp proves all of them: they were written together."""
        for key in puts:
            found = self._read({"key": _encoded(key)})
            if found and stamp.decode(_decoded(found[0].get("value", "")), key).write_id == write_id:
                return dict.fromkeys(puts, str(int(found[0]["mod_revision"])))
        return None

    def _lease(self, ttl_seconds: int) -> Lease:
        """One that was granted without an answer runs out by itself, so that it may be asked for again."""
        asked_at = self._clock.monotonic()
        answer = self._client.ask("lease/grant", {"TTL": ttl_seconds, "ID": 0})
        return _EtcdLease(self._client, int(answer["ID"]), ttl_seconds, self._clock, asked_at)

    def _read(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._client.ask("kv/range", question).get("kvs", [])
        return found


class _EtcdLease(Lease):
    """Any member renews it: which of them it was granted by does not matter."""

    def __init__(self, client: EtcdClient, lease_id: int, ttl_seconds: int, clock: Clock, asked_at: float) -> None:
        super().__init__(lease_id, ttl_seconds, clock, asked_at)
        self._client = client

    def _refresh(self) -> bool:
        answer = self._client.ask("lease/keepalive", {"ID": self.lease_id})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def _revoke(self) -> None:
        with contextlib.suppress(LeaseLostError):
            self._client.ask("lease/revoke", {"ID": self.lease_id})


class _EtcdWatch(Watch):
    """A stream of etcd's own, begun again where it ended.

    A member that is cut off from the others keeps its streams and tells nothing: after each silence a member is asked
    that answers for the whole cluster, and the next stream is that one's.
    """

    def __init__(self, client: EtcdClient, prefix: str, snapshot: Callable[[str], tuple[int, list[Entry]]]) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._snapshot = snapshot
        self._revision: int | None = None
        self._stream: Iterator[dict[str, Any]] | None = None

    def next(self, timeout_seconds: float) -> Changes | None:
        if self._revision is None and not self.is_closed:
            self._revision, found = self._snapshot(self._prefix)
            return Changes(True, {entry.key: entry for entry in found})
        deadline = time.monotonic() + timeout_seconds
        while not self.is_closed:
            try:
                changes = self._read()
            except BaseException:
                self._end_stream()
                raise
            if changes is not None:
                return changes
            if time.monotonic() >= deadline:
                return None
        self._end_stream()
        return None

    def _read(self) -> Changes | None:
        """The next answer of the stream that says something; None when it was silent."""
        if self._stream is None:
            self._stream = self._client.stream("watch", {"create_request": self._question()}, _SILENCE_SECONDS)
        for said in self._stream:
            result = said.get("result", {})
            if result.get("canceled") or int(result.get("compact_revision", 0)):
                self._end_stream()
                self._revision, found = self._snapshot(self._prefix)
                return Changes(True, {entry.key: entry for entry in found})
            events = result.get("events", [])
            if events:
                # Not that of the header, which may be ahead of what has been sent.
                self._revision = max(int(event["kv"]["mod_revision"]) for event in events)
                return Changes(False, dict(map(_changed, events)))
        self._end_stream()
        self._client.ask("kv/range", {"key": _encoded(self._prefix), "limit": 1, "keys_only": True})
        return None

    def _question(self) -> dict[str, Any]:
        assert self._revision is not None
        return {
            "key": _encoded(self._prefix),
            "range_end": _encoded(end_of(self._prefix)),
            "start_revision": self._revision + 1,
        }

    def end(self) -> None:
        self._end_stream()

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if isinstance(stream, Generator):
            stream.close()


def _changed(event: dict[str, Any]) -> tuple[str, Entry | None]:
    found = event["kv"]
    if event.get("type") == "DELETE":
        return _decoded(found["key"]).decode("ascii"), None
    entry = _entry(found)
    return entry.key, entry


def _compare(check: Check) -> dict[str, Any]:
    key, revision = _encoded(check.key), numeric_version(check)
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def _request(write: Write, write_id: str) -> dict[str, Any]:
    if isinstance(write, Delete):
        return {"request_delete_range": {"key": _encoded(write.key)}}
    put: dict[str, Any] = {"key": _encoded(write.key), "value": _encoded(stamp.encode(write_id, write.value))}
    if write.lease is not None:
        put["lease"] = write.lease.lease_id
    return {"request_put": put}


def _entry(found: dict[str, Any]) -> Entry:
    key = _decoded(found["key"]).decode("ascii")
    return Entry(key, stamp.decode(_decoded(found.get("value", "")), key).value, str(int(found["mod_revision"])))


def _encoded(text: str | bytes) -> str:
    return b64encode(text.encode("ascii") if isinstance(text, str) else text).decode("ascii")


def _decoded(text: str) -> bytes:
    return b64decode(text, validate=True)

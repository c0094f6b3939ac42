"""A metadata store in etcd, for clusters.

Invariants
- A version is the revision of etcd that wrote the key. Revisions only grow, so no version comes back.
- A commit is one transaction of etcd, however many keys it names.
- Values are stamped (`stamp.py`). A request without an answer is undecided: the stamp is looked for before the write
  is made again, so that a write that was done is not reported as a conflict with itself.
- A range of many pages is read at one revision: it is a snapshot.
"""

from __future__ import annotations

import contextlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import requests
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception

from tidelog.clock import Clock, SystemClock
from tidelog.errors import (
    AccessDeniedError,
    ClosedError,
    ConflictError,
    DataError,
    InputError,
    LeaseLostError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.tier.keys import check_key, check_prefix
from tidelog.tier.metadata import stamp
from tidelog.tier.metadata.lease import Lease
from tidelog.tier.metadata.store import Check, Delete, Entry, MetadataStore, Put, Write, end_of, numeric_version
from tidelog.tier.metadata.undecided import settle

REQUEST_TIMEOUT_SECONDS = 5.0
_PAGE_ENTRIES = 200
_KEYS_AT_ONCE = 100  # etcd takes 128 operations in one transaction, unless it was told otherwise
_API_PATH = "/v3/"
# Codes of gRPC, which etcd puts into its errors.
_INVALID, _NOT_FOUND, _DENIED, _UNAUTHENTICATED = 3, 5, 7, 16


class EtcdMetadataStore(MetadataStore):
    """Nothing is asked of the server until it is needed."""

    supports_multi_key = True
    supports_leases = True
    reads_many_at_once = True
    floor_is_cheap = False  # the server gathers everything in the range before it sorts

    def __init__(
        self, host: str, port: int, *, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS, clock: Clock | None = None
    ) -> None:
        self.url = f"etcd://{host}:{port}"
        self._clock = clock or SystemClock()
        self._client = Etcd3Client(host, port, timeout=timeout_seconds, api_path=_API_PATH)
        self._is_closed = False

    def get(self, key: str) -> Entry | None:
        found = self._read({"key": _encoded(check_key(key))})
        return _entry(found[0]) if found else None

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            some = [_encoded(check_key(key)) for key in keys[first : first + _KEYS_AT_ONCE]]
            questions = [{"request_range": {"key": key}} for key in some]
            answer = self._ask("kv/txn", {"compare": [], "success": questions, "failure": []})
            for response in answer.get("responses", []):
                for entry in map(_entry, response.get("response_range", {}).get("kvs", [])):
                    found[entry.key] = entry
        return found

    def change_mark(self) -> object | None:
        """The revision of the whole store: one small request."""
        answer = self._ask("kv/range", {"key": _encoded("\0"), "limit": 1, "keys_only": True})
        return int(answer["header"]["revision"])

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
        self._is_closed = True
        self._client.session.close()

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        return [_entry(found) for found in self._pages(prefix, start, limit, keys_only=False)]

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        return [_decoded(found["key"]).decode("ascii") for found in self._pages(prefix, start, limit, keys_only=True)]

    def _pages(self, prefix: str, start: str, limit: int | None, *, keys_only: bool) -> Iterator[dict[str, Any]]:
        first, revision, left = start or "\0", 0, limit
        while left is None or left > 0:
            size = _PAGE_ENTRIES if left is None else min(left, _PAGE_ENTRIES)
            question = {"key": _encoded(first), "range_end": _encoded(end_of(prefix)), "limit": size}
            answer = self._ask("kv/range", question | {"revision": revision, "keys_only": keys_only})
            found = answer.get("kvs", [])
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
        return settle(lambda: self._transact(transaction, puts), lambda: self._landed(write_id, puts))

    def _transact(self, transaction: dict[str, Any], puts: list[str]) -> dict[str, str]:
        answer = self._ask("kv/txn", transaction)
        if not answer.get("succeeded", False):
            raise ConflictError("a key was changed by somebody else", hint="Read it again and decide")
        return dict.fromkeys(puts, str(int(answer["header"]["revision"])))

    def _landed(self, write_id: str, puts: list[str]) -> dict[str, str] | None:
        """One key with our stamp proves all of them: they were written together."""
        for key in puts:
            found = self._read({"key": _encoded(key)})
            if found and stamp.decode(_decoded(found[0].get("value", "")), key).write_id == write_id:
                return dict.fromkeys(puts, str(int(found[0]["mod_revision"])))
        return None

    def _lease(self, ttl_seconds: int) -> Lease:
        asked_at = self._clock.monotonic()
        answer = self._ask("lease/grant", {"TTL": ttl_seconds, "ID": 0})
        return _EtcdLease(self, int(answer["ID"]), ttl_seconds, self._clock, asked_at)

    def _read(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("kv/range", question).get("kvs", [])
        return found

    def _ask(self, path: str, question: dict[str, Any]) -> dict[str, Any]:
        if self._is_closed:
            raise ClosedError(f"{self.url} is closed")
        with _explained(self.url, path):
            answer = self._client.post(self._client.get_url(path), json=question)
            if not isinstance(answer, dict):
                raise DataError(f"{self.url}: an answer that etcd does not give")
            return answer


class _EtcdLease(Lease):
    def __init__(
        self, store: EtcdMetadataStore, lease_id: int, ttl_seconds: int, clock: Clock, asked_at: float
    ) -> None:
        super().__init__(lease_id, ttl_seconds, clock, asked_at)
        self._store = store

    def _refresh(self) -> bool:
        answer = self._store._ask("lease/keepalive", {"ID": self.lease_id})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def _revoke(self) -> None:
        with contextlib.suppress(LeaseLostError):
            self._store._ask("lease/revoke", {"ID": self.lease_id})


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


@contextlib.contextmanager
def _explained(url: str, operation: str) -> Iterator[None]:
    """Turns what the client says into an error of ours that says what to do."""
    try:
        yield
    except Etcd3Exception as error:
        raise _translate(error, url, operation) from error
    except (requests.RequestException, OSError) as error:
        raise StoreUnavailableError(f"{url} does not answer ({type(error).__name__})", operation=operation) from error


def _translate(error: Etcd3Exception, url: str, operation: str) -> TidelogError:
    code, said = _code_and_message(error)
    if code == _NOT_FOUND and "lease" in said:
        return LeaseLostError("the lease ran out", operation=operation, hint="Take a new one")
    if code in (_DENIED, _UNAUTHENTICATED):
        return AccessDeniedError(f"{url}: access is denied ({said})", operation=operation)
    if code == _INVALID:
        return InputError(f"{url} refused the request ({said})", operation=operation)
    return StoreUnavailableError(f"{url} is not available ({said})", operation=operation)


def _code_and_message(error: Etcd3Exception) -> tuple[int | None, str]:
    text = error.detail_text or str(error)
    try:
        said = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None, text[:200]
    code = said.get("code")
    return code if isinstance(code, int) else None, str(said.get("message", ""))[:200]

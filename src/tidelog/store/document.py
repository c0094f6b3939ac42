"""One document under one key of the metadata store, changed by compare-and-swap: the only loop that does so.

    steps = VersionedDocument(metadata, key, encode, decode)
    steps.update(lambda known: State(done=0) if known is None else replace(known, done=known.done + 1))

Invariants
- A write names the version that its value was made from; nothing unread is overwritten. A writer that loses the race
  reads and decides again. Each loser lost to a write that succeeded, so some writer always makes progress.
- `change` is called once for each attempt: any side effect it has must be repeatable. An error that it raises is final,
  its own ConflictError included: only the store's conflict on our write is a reason to retry.
- The number of attempts is bounded: "gave up after N conflicting writes to <key>".
- A write without an answer was done, or was not, or will be (`metadata/base.py` has settled what can be settled by
  then). The error reaches the caller, unless the document sets how many of them to retry (`unanswered_attempts`): then
  reading finds what was done, and a change that recognises its own work adds nothing to it.
- A change of a JSON struct keeps the fields that this version does not know: a newer one wrote them, and nodes of both
  share the documents while an installation is upgraded.
- With a fence every write requires the right it stands for: the fence decides in the same transaction, and the error
  that it raises for a lost right (FencedError) is final.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, overload

import msgspec

from tidelog.clock import jittered
from tidelog.codec import JSON_ERRORS, from_json
from tidelog.errors import ConflictError, DataError, StoreUnavailableError, TidelogError
from tidelog.store.metadata.base import Check, Delete, Entry, MetadataStore, Put

ATTEMPTS = 20
FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 0.5

Value = TypeVar("Value")
Result = TypeVar("Result")


class Versioned(NamedTuple, Generic[Value]):
    """A value as it was read, and the version to replace it by."""

    value: Value
    version: str


class Step(NamedTuple):
    """One write of a change. The key must have this version (None: not be there); a hint may lose a race."""

    write: Put | Delete
    version: str | None
    is_hint: bool = False


class Fence(Protocol):
    """The right to write, which is checked with every write: an epoch, or neighbours that must be as they were read."""

    def change(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """Makes these writes, and returns the versions of what was put.

        ConflictError when another write was first, any other error when the right is gone.
        """


class UnchangedNeighbours:
    """A fence of other keys, which must still have the versions that a decision was made on.

    Where a store changes one key at a time they are not checked: each use has a reason why that is safe.
    """

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._seen: dict[str, str | None] = {}

    def expect(self, key: str, version: str | None) -> None:
        """The next write is made only if this key has this version; the last word about a key counts."""
        self._seen[key] = version

    def change(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """All writes at once, or ConflictError."""
        checks = [Check(step.write.key, step.version) for step in steps]
        if self._metadata.supports_multi_key:
            checks += [Check(key, version) for key, version in self._seen.items()]
        return self._metadata.commit(checks, [step.write for step in steps])


class Attempts:
    """Counts what one change had to put up with: waits after each failure, and raises after too many."""

    def __init__(
        self,
        key: str,
        *,
        attempts: int = ATTEMPTS,
        unanswered_attempts: int = 1,
        gave_up: type[TidelogError] = ConflictError,
    ) -> None:
        self._key = key
        self._attempts = attempts
        self._unanswered_attempts = unanswered_attempts
        self._gave_up = gave_up
        self._lost = 0
        self._unanswered = 0

    def lost(self, error: ConflictError) -> None:
        """Another write was first. The first time it is tried again at once: as a rule there was one other."""
        self._lost += 1
        if self._lost >= self._attempts:
            message = f"gave up after {self._lost} conflicting writes to {self._key}"
            raise self._gave_up(message, hint="Try again when others write it less") from error
        # By chance, so that those who met once do not meet again.
        time.sleep(jittered(min(FIRST_PAUSE_SECONDS * (self._lost - 1), LONGEST_PAUSE_SECONDS), least=0))

    def unanswered(self, error: StoreUnavailableError) -> None:
        """Whether it was written is not known."""
        self._unanswered += 1
        if self._unanswered >= self._unanswered_attempts:
            raise error
        time.sleep(min(FIRST_PAUSE_SECONDS * 4**self._unanswered, LONGEST_PAUSE_SECONDS))


def retried(change: Callable[[], Result], key: str) -> Result:
    """For a change of more than one document, below `key`: all of it is repeated when another write was first.

    Here every ConflictError is a lost race; `change` reads what it decides on again each time.
    """
    attempts = Attempts(key)
    while True:
        try:
            return change()
        except ConflictError as error:
            attempts.lost(error)


class VersionedDocument(Generic[Value]):
    """One document of this type. It keeps nothing between calls, and threads may share it."""

    def __init__(
        self,
        metadata: MetadataStore,
        key: str,
        encode: Callable[[Value], bytes],
        decode: Callable[[bytes, str], Value],
        *,
        fence: Fence | None = None,
        attempts: int = ATTEMPTS,
        unanswered_attempts: int = 1,
        gave_up: type[TidelogError] = ConflictError,
    ) -> None:
        """`decode` gets the key too, for its errors. `gave_up` is raised after `attempts` conflicts."""
        self.key = key
        self._metadata = metadata
        self._encode = encode
        self._decode = decode
        self._fence = fence or UnchangedNeighbours(metadata)
        self._attempts = attempts
        self._unanswered_attempts = unanswered_attempts
        self._gave_up = gave_up

    def read(self) -> Versioned[Value] | None:
        """The current document; None if it does not exist."""
        entry = self._metadata.get(self.key)
        return None if entry is None else Versioned(self._decode(entry.value, self.key), entry.version)

    def create(self, value: Value) -> str:
        """Writes the first one, and returns its version; ConflictError when there is one."""
        return self.replace(value, None)

    def replace(self, value: Value, version: str | None) -> str:
        """One attempt, on a version that was read before (None: there was none); returns the new version.

        ConflictError when the version has changed. For a decision that may not be repeated without asking.
        """
        return self._fence.change([Step(Put(self.key, self._encode(value)), version)])[self.key]

    @overload
    def update(self, change: Callable[[Value | None], Value], *, rewrites: bool = False) -> Value: ...

    @overload
    def update(self, change: Callable[[Value | None], Value | None], *, rewrites: bool = False) -> Value | None: ...

    def update(self, change: Callable[[Value | None], Value | None], *, rewrites: bool = False) -> Value | None:
        """Writes what `change` makes of the document (None: it does not exist), and returns what `change` returned
        last.

        None leaves it unchanged, and so does a value equal to the current one, unless `rewrites`: then it gets a new
        version, and a write begun on the old one fails.
        """
        attempts = self._counted()
        while True:
            entry = self._metadata.get(self.key)
            before, version = (None, None) if entry is None else (self._decode(entry.value, self.key), entry.version)
            after = change(before)
            if after is None or (after == before and not rewrites):
                return after
            write = Put(self.key, self._changed(after, entry))
            if self._is_written(Step(write, version), attempts):
                return after

    def delete(self) -> None:
        """Deletes it in any version; it may be absent."""
        attempts = self._counted()
        while (entry := self._metadata.get(self.key)) is not None:
            if self._is_written(Step(Delete(self.key), entry.version), attempts):
                return

    def _changed(self, after: Value, before: Entry | None) -> bytes:
        is_json = self._encode is encode_json
        if is_json and before is not None and isinstance(after, msgspec.Struct):
            return encode_json(after, before.value)
        return self._encode(after)

    def _is_written(self, step: Step, attempts: Attempts) -> bool:
        try:
            self._fence.change([step])
        except ConflictError as error:
            attempts.lost(error)
        except StoreUnavailableError as error:
            attempts.unanswered(error)
        else:
            return True
        return False

    def _counted(self) -> Attempts:
        return Attempts(
            self.key,
            attempts=self._attempts,
            unanswered_attempts=self._unanswered_attempts,
            gave_up=self._gave_up,
        )


# JSON documents: a struct, or a mapping without a fixed shape.


Document = TypeVar("Document", bound=msgspec.Struct)


def encode_json(document: msgspec.Struct, before: bytes | None = None) -> bytes:
    """The JSON of a document. Of `before`, the JSON that it was made from, the fields that are not known here stay."""
    encoded = msgspec.json.encode(document)
    if before is None:
        return encoded
    try:
        known = msgspec.json.decode(before, type=dict[str, msgspec.Raw])
    except JSON_ERRORS:
        return encoded
    fields = msgspec.structs.fields(document)
    kept = {name: value for name, value in known.items() if name not in {field.encode_name for field in fields}}
    for field in fields:
        inner, raw = getattr(document, field.name), known.get(field.encode_name)
        if raw is not None and isinstance(inner, msgspec.Struct):
            kept[field.encode_name] = msgspec.Raw(encode_json(inner, bytes(raw)))
    return (
        msgspec.json.encode({**msgspec.json.decode(encoded, type=dict[str, msgspec.Raw]), **kept}) if kept else encoded
    )


def decode_json(data: bytes, key: str, kind: type[Document]) -> Document:
    """The document under a key; DataError when it is something else."""
    try:
        return from_json(data, kind)
    except JSON_ERRORS as error:
        raise DataError(
            f"{key} in the metadata store cannot be understood: {error}",
            hint="`tidelog topic rebuild-catalog` rebuilds the catalog from the objects",
        ) from error


def decode_mapping(data: bytes, key: str) -> dict[str, object]:
    """A document without a fixed shape, such as a topic's own settings."""
    try:
        return msgspec.json.decode(data, type=dict[str, object])
    except JSON_ERRORS as error:
        raise DataError(f"{key} in the metadata store cannot be understood: {error}") from error

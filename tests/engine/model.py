"""What an engine is, said in the plainest way: every state after every entry, in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from tidelog.engine.entry import (
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
    operations,
)
from tidelog.engine.mvcc.digest import Digest
from tidelog.engine.wal.value import encode_value
from tidelog.log.frame import crc32


class RefusedError(Exception):
    """The state does not allow an operation."""


@dataclass
class ModelObject:
    """An object as it is to be seen."""

    data: bytes
    metadata: dict[str, object]
    seq: int


@dataclass
class ModelBucket:
    """A bucket, when it was created, and what is in it."""

    seq: int
    objects: dict[str, ModelObject] = field(default_factory=dict)


State = dict[str, ModelBucket]


class Model:
    """All states of an engine: `states[seq]` is the one after the entry of that seq. None changes once it is made."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {0: {}}
        self.entries: dict[int, Entry] = {}

    def __deepcopy__(self, memo: object) -> Self:
        """A model that goes its own way from here on."""
        other = type(self)()
        other.states, other.entries = dict(self.states), dict(self.entries)
        return other

    @property
    def applied_seq(self) -> int:
        return max(self.states)

    def apply(self, seq: int, entry: Entry) -> bool:
        """Whether it was applied, wholly."""
        before = self.states[self.applied_seq]
        after = {name: ModelBucket(bucket.seq, dict(bucket.objects)) for name, bucket in before.items()}
        self.entries[seq] = entry
        try:
            for operation in operations(entry):
                _apply(after, seq, operation)
        except RefusedError:
            self.states[seq] = before
            return False
        self.states[seq] = after
        return True

    def refuse(self, seq: int, entry: Entry) -> None:
        """Its seq is used, and nothing has changed."""
        self.states[seq] = self.states[self.applied_seq]
        self.entries[seq] = entry

    def roll_back(self, seq: int) -> None:
        """Forgets what came after a seq, and knows of that seq."""
        last = max(known for known in self.states if known <= seq)
        self.states = {known: state for known, state in self.states.items() if known <= seq}
        self.entries = {known: entry for known, entry in self.entries.items() if known <= seq}
        self.states[seq] = self.states[last]

    def at(self, seq: int) -> State:
        """The state to be seen at a seq."""
        # A list first: others may look while entries are applied.
        return self.states[max(known for known in list(self.states) if known <= seq)]

    def digest(self, seq: int | None = None) -> str:
        """The digest of a state, computed from what is in it."""
        found = Digest()
        for name, bucket in self.at(self.applied_seq if seq is None else seq).items():
            found.add_bucket(name.encode(), bucket.seq)
            for key, item in bucket.objects.items():
                crc = crc32(encode_value(item.data, item.metadata))
                found.add_object(name.encode(), key.encode(), item.seq, len(item.data), crc)
        return found.text()


def _apply(state: State, seq: int, operation: Operation) -> None:
    match operation:
        case CreateBucket(bucket):
            _require(bucket not in state)
            state[bucket] = ModelBucket(seq)
        case DeleteBucket(bucket, force):
            _require(bucket in state and (force or not state[bucket].objects))
            del state[bucket]
        case PutObject(bucket, key, data, metadata):
            _require(bucket in state and _holds(operation, state[bucket].objects.get(key)))
            state[bucket].objects[key] = ModelObject(bytes(data), dict(metadata), seq)
        case DeleteObject(bucket, key):
            _require(bucket in state and _holds(operation, state[bucket].objects.get(key)))
            state[bucket].objects.pop(key, None)
        case CopyObject(src_bucket, src_key, dest_bucket, dest_key):
            _require(src_bucket in state and src_key in state[src_bucket].objects and dest_bucket in state)
            _require(_holds(operation, state[dest_bucket].objects.get(dest_key)))
            source = state[src_bucket].objects[src_key]
            state[dest_bucket].objects[dest_key] = ModelObject(source.data, dict(source.metadata), seq)


def _holds(operation: PutObject | DeleteObject | CopyObject, found: ModelObject | None) -> bool:
    """Whether its conditions hold for what is there."""
    if getattr(operation, "if_absent", False):
        return found is None
    if operation.if_match is None and operation.if_match_crc is None:
        return True
    if found is None:
        return False
    crc = crc32(encode_value(found.data, found.metadata))
    return operation.if_match in (None, found.seq) and operation.if_match_crc in (None, crc)


def _require(holds: bool) -> None:
    if not holds:
        raise RefusedError


def batch(*entries: Operation) -> Batch:
    """A batch, written shortly."""
    return Batch(entries)


def model_of(entries: Iterable[tuple[int, Entry]]) -> Model:
    """The model after some entries."""
    model = Model()
    for seq, entry in entries:
        model.apply(seq, entry)
    return model

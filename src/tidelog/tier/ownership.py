"""The right to change a topic: claimed by compare-and-swap, checked with every change.

Invariants
- An epoch is used once. Whoever claims takes the next one, on the version of the entry that was read.
- Every change of a topic goes through `change`. Where the store can, the owner's entry is checked in the same commit:
  after somebody else's claim nothing of ours gets through, however long we slept.
- Where it cannot (one key at a time), the owner's entry is read before each change, and every entry that an earlier
  owner may be about to change has been rewritten by the new owner when it took over: the change then fails on the
  entry's own version. `bucket.py` has the whole argument.
- A claim is made on the owner document that its reasons were read from: if that has changed since, ConflictError.

Epochs are what makes this safe. That nobody claims what a living node holds, unless that is meant, is the concern of
`node_lease.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tidelog.clock import Clock
from tidelog.errors import ConflictError, FencedError
from tidelog.log.binding import new_log_id
from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog
from tidelog.tier.metadata.store import Check, Delete, Put
from tidelog.tier.node_lease import NodeLease
from tidelog.tier.owner import Owner

RESCUE_HINT = "What it had accepted and not shipped stays on its disk: `tidelog topic rescue` shows it"
_HINTS = {
    "engine": "Its orchestrator still has what it had not shipped; `tidelog.restore_engine` makes a new copy of it"
}


class Step(NamedTuple):
    """One write of a change. The key must have this version (None: not be there); a hint may lose a race."""

    write: Put | Delete
    version: str | None
    is_hint: bool = False


class Ownership:
    """One claim. It is good until somebody else claims the topic; then every use of it raises FencedError."""

    def __init__(self, catalog: Catalog, owner: Owner, version: str, previous: Owner | None) -> None:
        self.catalog = catalog
        self.owner = owner
        self.previous = previous
        self._version = version

    @property
    def version(self) -> str:
        """Of the owner's entry, as this claim left it."""
        return self._version

    @property
    def epoch(self) -> int:
        return self.owner.epoch

    def verify(self) -> None:
        """Asks the store whether the claim still holds."""
        found = self.catalog.owner()
        if found is None or found[1] != self._version:
            raise self._fenced(None if found is None else found[0])

    def change(self, steps: Sequence[Step]) -> None:
        """All steps at once where the store can, else one after the other in this order."""
        metadata = self.catalog.metadata
        if not metadata.supports_multi_key:
            self.verify()
            for step in steps:
                self._change_one(step)
            return
        checks = [Check(self.catalog.keys.owner, self._version)]
        checks += [Check(step.write.key, step.version) for step in steps]
        try:
            metadata.commit(checks, [step.write for step in steps])
        except ConflictError:
            self.verify()
            raise

    def _change_one(self, step: Step) -> None:
        try:
            self.catalog.metadata.commit([Check(step.write.key, step.version)], [step.write])
        except ConflictError:
            self.verify()
            if not step.is_hint:
                raise

    def give_back_lineage(self) -> None:
        """Nothing was accepted under this claim: what the one before left on its disk is still the end of the topic."""
        if self.previous is None or self.previous.lineage == self.owner.lineage:
            return
        self._rewrite(msgspec.structs.replace(self.owner, lineage=self.previous.lineage, session=""))

    def release(self) -> None:
        """This node has it open no more, and goes on: others may open it at once."""
        if self.owner.session:
            self._rewrite(msgspec.structs.replace(self.owner, session=""))

    def _rewrite(self, owner: Owner) -> None:
        key = self.catalog.keys.owner
        versions = self.catalog.metadata.commit([Check(key, self._version)], [Put(key, documents.encode(owner))])
        self.owner, self._version = owner, versions[key]

    def remove(self) -> None:
        """The last change of a topic that is being deleted: from here on nobody owns it."""
        key = self.catalog.keys.owner
        try:
            self.catalog.metadata.commit([Check(key, self._version)], [Delete(key)])
        except ConflictError:
            self.verify()
            raise

    def _fenced(self, by: Owner | None) -> FencedError:
        noun = self.catalog.keys.noun
        who = (
            f"the {noun} was deleted elsewhere"
            if by is None
            else f"{by.node} owns the {noun} now, with epoch {by.epoch}"
        )
        hint = _HINTS.get(noun, RESCUE_HINT)
        return FencedError(f"{who}; epoch {self.epoch} can change nothing any more", hint=hint)


def new_claim() -> str:
    """A name for a claim that nobody else has."""
    return secrets.token_hex(8)


FoundOwner = tuple[Owner, str] | None
"""An owner document and its version; None where there is none."""


def claim_topic(
    catalog: Catalog,
    found: FoundOwner,
    lease: NodeLease,
    clock: Clock,
    claim: str,
    min_epoch: int = 1,
    log_id: str | None = None,
) -> Ownership:
    """Claims the epoch after that of the owner document that was found; ConflictError when it is another by now.

    `log_id` is that of the files here: a log that nobody has claimed before keeps it.
    """
    key, previous = catalog.keys.owner, None if found is None else found[0]
    before = catalog.epoch_floor() if previous is None else previous.epoch
    lease.hold()
    owner = Owner(
        epoch=max(before + 1, min_epoch),
        claim=claim,
        lineage=claim,
        node=lease.node,
        claimed_us=clock.now_us(),
        session=lease.session,
        log_id=previous.log_id if previous is not None else log_id or new_log_id(),
    )
    check = Check(key, None if found is None else found[1])
    try:
        versions = catalog.metadata.commit([check], [Put(key, documents.encode(owner))])
    except ConflictError as error:
        raise claimed_meanwhile(catalog) from error
    return Ownership(catalog, owner, versions[key], previous)


def claimed_meanwhile(catalog: Catalog) -> ConflictError:
    """Another node was faster."""
    return ConflictError(
        f"another node claimed the {catalog.keys.noun} at the same moment", operation="claim", hint="Open it again"
    )

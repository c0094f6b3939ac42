"""The intake of a topic as a writer that does not own it sees it: stage rows, commit them, ask what became of them.

    area = IntakeArea(objects, metadata, keys)
    with area.open_part("nightly", 7, partition=0, attempt="f00d") as writer:     # in a task, anywhere
        writer.write(frames, rows)
    area.commit("nightly", 7, [writer.part])                                      # once, by whoever coordinates
    area.wait("nightly", 7, timeout_seconds=60)

Invariants
- A commit is one compare-and-swap: all rows of a version are the topic's from then on, or none.
- Committing the same version again, or an older one, changes nothing. So whoever does not know whether a commit was
  done makes it again.
- What is committed is never touched here again. `discard` first makes sure that no commit on its way can still land.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Literal

from tidelog.clock import Clock, SystemClock
from tidelog.errors import ConflictError, DataError, InputError, RetryError, StoreUnavailableError
from tidelog.log.frame import crc32
from tidelog.tier.intake_document import Consignment, IntakeDocument, IntakeStatus, decode_intake, encode_intake
from tidelog.tier.intake_part import Manifest, PartWriter, StagedPart, encode_manifest
from tidelog.tier.keys import TopicKeys, consignment_name
from tidelog.tier.metadata.store import Check, MetadataStore, Put
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.upload import checksum_text

MAX_APP_BYTES = 200
Outcome = Literal["committed", "already committed"]
Change = Callable[[IntakeDocument], IntakeDocument | None]

_ATTEMPTS = 50
_UNANSWERED_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.5
_DELETED_AT_ONCE = 200


class IntakeArea:
    """Where rows are handed over to one topic. Threads may share it."""

    def __init__(
        self, objects: ObjectStore, metadata: MetadataStore, keys: TopicKeys, clock: Clock | None = None
    ) -> None:
        self._objects = objects
        self._metadata = metadata
        self._keys = keys
        self._clock = clock or SystemClock()

    # In tasks

    def part_key(self, app: str, version: int, partition: int, attempt: str) -> str:
        """Where a task puts its rows. No two attempts may have the same name."""
        return self._keys.staged_part(consignment_of(app, version), partition, attempt)

    def open_part(self, app: str, version: int, partition: int, attempt: str) -> PartWriter:
        """A writer for the rows of one task."""
        return PartWriter(self._objects, self.part_key(app, version, partition, attempt))

    # By whoever coordinates

    def commit(self, app: str, version: int, parts: Sequence[StagedPart], *, is_once: bool = False) -> Outcome:
        """Hands the rows of these parts over, in this order.

        `is_once` says that the application has a random name and never comes back. StoreUnavailableError means that
        it is not known whether it was done: commit again.
        """
        id = consignment_of(app, version)
        self._check_parts(id, parts)
        if self._is_committed(self._load()[0], app, version):
            return "already committed"
        consignment = self._manifested(id, app, version, parts, is_once)

        def add(document: IntakeDocument) -> IntakeDocument | None:
            return None if self._is_committed(document, app, version) else document.committed(consignment)

        if self._change(add):
            return "committed"
        mine = self._load()[0].find(id)
        return "committed" if mine is not None and mine.manifest == consignment.manifest else "already committed"

    def status(self, app: str, version: int) -> IntakeStatus:
        """What became of a version: unknown, pending, placed, taken or refused."""
        consignment_of(app, version)
        return self._load()[0].status(app, version)

    def wait(self, app: str, version: int, timeout_seconds: float) -> IntakeStatus:
        """Returns once a committed version is in the topic. When the time has passed, the status says how far it is.

        DataError when it was refused, or was never committed.
        """
        deadline, pause = time.monotonic() + timeout_seconds, _FIRST_PAUSE_SECONDS
        while True:
            status = self.status(app, version)
            if status.state == "refused":
                raise DataError(f"version {version} of {app} was refused: {status.error}", operation="take in")
            if status.state == "unknown":
                raise DataError(f"version {version} of {app} was never committed", operation="take in")
            left = deadline - time.monotonic()
            if status.state == "taken" or left <= 0:
                return status
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def discard(self, app: str, version: int, keys: Iterable[str] | None = None) -> int:
        """Removes what was staged for a version that is not to be committed; returns how many objects.

        What is committed stays, all of it: then nothing is removed. Without `keys` everything goes that was staged
        for the version, by whichever attempt.
        """
        id = consignment_of(app, version)
        if not self._bar_late_commits(app, version):
            return 0
        prefix = self._keys.consignment_prefix(id)
        names = iter(keys) if keys is not None else (info.key for info in self._objects.list(prefix))
        removed = 0
        while some := [key for key in islice(names, _DELETED_AT_ONCE) if key.startswith(prefix)]:
            self._objects.delete(some)
            removed += len(some)
        self._objects.remove_folder(prefix)
        return removed

    def drop(self, app: str, version: int, parts: Iterable[StagedPart]) -> int:
        """Removes what was staged again for a version that had been committed before; returns how many objects.

        While the version is listed nothing is removed here: who takes it from the list removes all that was staged.
        """
        keys = [part.key for part in parts]
        document = self._load()[0]
        if document.find(consignment_of(app, version)) is not None or document.status(app, version).state != "taken":
            return 0
        self._objects.delete(keys)
        self._objects.remove_folder(self._keys.consignment_prefix(consignment_of(app, version)))
        return len(keys)

    def give_up(self, app: str, version: int) -> bool:
        """Forgets a version that was refused: its rows stay missing, and later versions go on. False: there is none."""
        id = consignment_of(app, version)
        return self._change(lambda known: None if known.given_up(id) == known else known.given_up(id))

    # How that is done

    def _check_parts(self, id: str, parts: Sequence[StagedPart]) -> None:
        prefix = self._keys.consignment_prefix(id)
        keys = [part.key for part in parts]
        if any(not key.startswith(prefix) for key in keys) or len(set(keys)) < len(keys):
            raise InputError("a part of another version, or the same part twice, cannot be committed")

    def _is_committed(self, document: IntakeDocument, app: str, version: int) -> bool:
        return document.status(app, version).state not in ("unknown", "refused")

    def _manifested(self, id: str, app: str, version: int, parts: Sequence[StagedPart], is_once: bool) -> Consignment:
        """Writes the manifest, under a name of its own: another coordinator may be about to commit the same version."""
        key = self._keys.manifest(id, secrets.token_hex(8))
        data = encode_manifest(Manifest(id=id, parts=tuple(parts)))
        self._objects.put(key, data)
        return Consignment(
            id=id,
            app=app,
            version=version,
            manifest=key,
            checksum=checksum_text(crc32(data, 0)),
            rows=sum(part.rows for part in parts),
            bytes=sum(part.bytes for part in parts),
            committed_us=self._clock.now_us(),
            is_once=is_once,
        )

    def _bar_late_commits(self, app: str, version: int) -> bool:
        """Gives the document a new version: a commit that is on its way cannot land any more. False: one has."""
        return self._change(lambda known: None if self._is_committed(known, app, version) else known)

    def _load(self) -> tuple[IntakeDocument, str | None]:
        entry = self._metadata.get(self._keys.intake)
        if entry is None:
            return IntakeDocument(), None
        return decode_intake(entry.value, entry.key), entry.version

    def _change(self, change: Change) -> bool:
        """Whether something was to be changed, and was. Others may be faster, many times."""
        unanswered = 0
        for attempt in range(_ATTEMPTS):
            document, version = self._load()
            changed = change(document)
            if changed is None:
                return False
            try:
                write = Put(self._keys.intake, encode_intake(changed))
                self._metadata.commit([Check(self._keys.intake, version)], [write])
            except ConflictError:
                time.sleep(random.uniform(0, min(_FIRST_PAUSE_SECONDS * (attempt + 1), _LONGEST_PAUSE_SECONDS)))
            except StoreUnavailableError:
                unanswered += 1
                if unanswered == _UNANSWERED_ATTEMPTS:
                    raise
                time.sleep(min(_FIRST_PAUSE_SECONDS * 4**unanswered, _LONGEST_PAUSE_SECONDS))
            else:
                return True
        raise RetryError("others changed the intake again and again", hint="Try again")


def consignment_of(app: str, version: int) -> str:
    """The name of a version's consignment; InputError when there can be no such version."""
    if not app or not app.isprintable() or len(app.encode()) > MAX_APP_BYTES:
        raise InputError(f"an application is named by 1 to {MAX_APP_BYTES} bytes of printable text, not {app!r:.80}")
    if version < 0:
        raise InputError(f"a version is a number from 0 on, not {version}")
    return consignment_name(app, version)

"""What `tidelog engine verify` looks at in a recovered engine and in its store.

Invariants
- The engine is recovered in an overlay: its own files stay as they are.
- Every value is read and compared with the checksum that its version has, on this disk and in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidelog.cli.engine_checks import Finding
from tidelog.cli.engine_words import describe_key
from tidelog.engine.body import decode_body
from tidelog.engine.cell import Cell, decode_bucket, decode_cell
from tidelog.engine.cold import ColdReader
from tidelog.engine.core import Core
from tidelog.engine.manifest import Manifest, read_manifest
from tidelog.engine.store_checkpoint import StoredState
from tidelog.engine.version_keys import BUCKETS, seq_of
from tidelog.errors import DataError, NotFoundError, TidelogError
from tidelog.tier.catalog import Catalog
from tidelog.tier.history_check import check_history
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.object_store import ObjectStore

OnDone = Callable[[int], None]
_COLD_BATCH = 50_000


class _Waiting(NamedTuple):
    """A version whose value is in the store."""

    position: int
    key: bytes
    cell: Cell


class StateCheck:
    """The index as a whole, and every value that it points to."""

    def __init__(self, core: Core, reader: ColdReader | None, *, reads_store: bool) -> None:
        self._core = core
        self._reader = reader
        self._reads_store = reads_store
        self._waiting: list[_Waiting] = []
        self.findings: list[Finding] = []
        self.tree_pages = 0
        self.versions = 0
        self.hot_values = 0
        self.cold_values = 0

    def count(self) -> int:
        """Checks the tree; how many versions there are to look at."""
        try:
            report = self._core.tree.check()
        except DataError as error:
            self.findings.append(Finding("index", error.message))
            return 0
        self.tree_pages = report.pages
        return report.cells

    def run(self, on_done: OnDone) -> None:
        """Looks at every version."""
        self._check_marks()
        try:
            for key, value in self._core.tree.scan():
                self.versions += 1
                self._check(key, value)
                if len(self._waiting) >= _COLD_BATCH:
                    self._read_waiting()
                if self.versions % 1000 == 0:
                    on_done(self.versions)
        except DataError as error:
            self.findings.append(Finding("index", error.message))
        self._read_waiting()

    def _check_marks(self) -> None:
        marks = self._core.marks
        if not marks.high_water_mark <= marks.low_water_mark <= marks.applied_seq:
            text = f"high-water {marks.high_water_mark}, low-water {marks.low_water_mark}, applied {marks.applied_seq}"
            self.findings.append(Finding("marks", f"they are not in order: {text}"))

    def _check(self, key: bytes, value: bytes) -> None:
        try:
            if seq_of(key) > self._core.marks.applied_seq:
                raise DataError(f"it is of seq {seq_of(key)}, and the last one is {self._core.marks.applied_seq}")
            if key[:1] == BUCKETS:
                decode_bucket(value)
                return
            cell = decode_cell(value)
            if not cell.is_tombstone:
                self._check_value(key, cell)
        except TidelogError as error:
            self._add(key, error)

    def _check_value(self, key: bytes, cell: Cell) -> None:
        stored = cell.inline
        if stored is None:
            stored = self._core.wal.read_stored(cell.position, cell.stored_bytes)
        if stored is not None:
            decode_body(stored, cell.codec, cell.size, cell.crc, cell.lsn)
            self.hot_values += 1
        elif self._reader is None:
            raise NotFoundError(f"its value, at position {cell.position}, has left this disk, and no store is known")
        elif self._reads_store:
            self._waiting.append(_Waiting(cell.position, key, cell))

    def _read_waiting(self) -> None:
        """In the order of the log: neighbours come with one request."""
        for _, key, cell in sorted(self._waiting):
            assert self._reader is not None
            try:
                self._reader.read(cell)
                self.cold_values += 1
            except (DataError, NotFoundError) as error:
                self._add(key, error)
        self._waiting = []

    def _add(self, key: bytes, error: TidelogError) -> None:
        where = "" if error.path is None else f" [{error.path}]"
        self.findings.append(Finding("versions", f"{describe_key(key)}: {error.message}{where}"))


class StoreCheck:
    """What is in the store, against the manifest."""

    def __init__(self, objects: ObjectStore, metadata: MetadataStore, keys: EngineKeys) -> None:
        self._objects = objects
        self._metadata = metadata
        self._keys = keys
        self._catalog = Catalog(metadata, keys)
        self.findings: list[Finding] = []
        self.objects_read = 0
        self.bytes_read = 0
        self.states = 0

    def total_bytes(self) -> int:
        """How much there is to read, as far as the catalog can tell."""
        try:
            return sum(one.size for one in self._catalog.between(0, 1 << 63))
        except DataError:
            return 0  # reading them says what is wrong

    def run(self, applied_seq: int | None, on_done: OnDone) -> None:
        """Reads every object and every state. `applied_seq` is that of the engine here, where it is known."""
        manifest: list[Manifest] = []

        def read() -> None:
            found = read_manifest(self._metadata, self._keys)
            manifest.extend(() if found is None else (found[0],))

        self._noting("manifest", read)
        self._noting("catalog", self._check_owner)
        self._noting("catalog", lambda: self._read_objects(on_done))
        for one in manifest:
            self._noting("catalog", lambda one=one: self._check_manifest(one, applied_seq))  # type: ignore[misc]
            self._read_states(one)

    def _noting(self, part: str, work: Callable[[], None]) -> None:
        """A document that cannot be read is a finding, and the others are read all the same."""
        try:
            work()
        except DataError as error:
            self._add(part, error.message)

    def _check_owner(self) -> None:
        if self._catalog.owner() is None and self._catalog.oldest() is not None:
            self._add("catalog", "nobody is written down as the owner of the engine")

    def _read_objects(self, on_done: OnDone) -> None:
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            on_done(done)

        history = check_history(self._catalog, self._objects, None, count)
        self.objects_read, self.bytes_read = history.objects, history.bytes
        for problem in history.problems:
            self._add("objects", str(problem).replace("offsets ", "LSNs ").replace("offset ", "LSN "))
        self._check_positions()

    def _check_positions(self) -> None:
        expected: int | None = None
        for one in self._catalog.between(0, 1 << 63):
            if expected is not None and one.start_position != expected:
                self._add("objects", f"{one.object_id} begins at position {one.start_position}, not at {expected}")
            expected = one.start_position + one.raw_size

    def _check_manifest(self, manifest: Manifest, applied_seq: int | None) -> None:
        next_lsn = self._catalog.next_offset()
        if manifest.shipped_lsn > max(1, next_lsn):
            text = f"it says that LSN {manifest.shipped_lsn - 1} is shipped, and the catalog ends at {next_lsn - 1}"
            self._add("manifest", text)
        found = self._catalog.at(manifest.shipped_lsn - 1)
        if found is not None and found.next_offset == manifest.shipped_lsn:
            position = found.start_position + found.raw_size
            if position != manifest.shipped_position:
                self._add("manifest", f"it says position {manifest.shipped_position}, the objects end at {position}")
        if applied_seq is not None and manifest.high_water_mark > applied_seq:
            text = f"seq {manifest.high_water_mark} is in the store, and this directory is at seq {applied_seq}"
            self._add("manifest", f"{text}: it was set back, or is owned elsewhere")

    def _read_states(self, manifest: Manifest) -> None:
        for listed in manifest.checkpoints:
            try:
                for _ in StoredState(self._objects, listed).rows():
                    pass
                self.states += 1
            except (DataError, NotFoundError) as error:
                self._add("states", f"{listed.key}: {error.message}")

    def _add(self, part: str, text: str) -> None:
        self.findings.append(Finding(part, text))

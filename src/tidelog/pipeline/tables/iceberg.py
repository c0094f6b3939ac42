"""An Iceberg table, through pyiceberg: a SQL catalog (SQLite will do) or a REST catalog, and no jar.

Invariants
- Workers write Parquet files into the table's location; one commit of the catalog adds them, together with the offset
  that the table then has reached. Files without such a commit are not part of the table.
- The offset is in the summary of the snapshot, so a table that is rolled back continues from there; it is also a table
  property, for when that snapshot has expired.
- A commit succeeds only if the table ends where this run began. A foreign commit in between (a compaction by another
  engine) is not a conflict; another run of ours is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NoSuchTableError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO, load_file_io

from tidelog.errors import ConflictError, DataError, InputError, InternalError, NotSupportedError
from tidelog.pipeline.tables.files import local_path
from tidelog.pipeline.tables.table import Step, TargetState, open_catalog, told_of_catalog
from tidelog.pipeline.tables.types import TableShape, from_json, must_be_rewritten

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

_PREFIX = "tidelog."
_STATE = "tidelog.state"
_ATTEMPT = "tidelog.attempt"
_ATTEMPTS = 5
# Its own retries add the same files to newer commits: rows of another run would be doubled.
_NO_RETRIES = {"commit.retry.num-retries": "0"}


@dataclass(frozen=True)
class IcebergLocation:
    """The file system of a table, as pyiceberg knows it."""

    properties: tuple[tuple[str, str], ...]

    @contextmanager
    def writing(self, key: str) -> Iterator[pa.NativeFile]:
        io = _opened(self, key)
        try:
            with io.new_output(key).create(overwrite=True) as stream:
                sink = stream if isinstance(stream, pa.NativeFile) else pa.PythonFile(stream, mode="w")
                yield sink
                sink.flush()
        except BaseException:
            # Nothing refers to it; where it cannot be removed it is what the catalog calls an orphan.
            _remove(io, [key])
            raise

    def reading(self, key: str) -> pa.NativeFile:
        stream = _opened(self, key).new_input(key).open()
        return stream if isinstance(stream, pa.NativeFile) else pa.PythonFile(stream, mode="r")

    def path_of(self, key: str) -> str | None:
        return local_path(key) if key.startswith(("file:", "/")) else None


@lru_cache(16)
def _io_of(properties: tuple[tuple[str, str], ...], location: str) -> FileIO:
    return load_file_io(dict(properties), location)


def _opened(place: IcebergLocation, key: str) -> FileIO:
    return _io_of(place.properties, key.rpartition("/")[0])


def _remove(io: FileIO, keys: Sequence[str]) -> None:
    for key in keys:
        try:
            io.delete(key)
        except OSError:
            continue


def iceberg_table(catalog_uri: str, identifier: str, **properties: str) -> IcebergTable:
    """The table `namespace.table` of a catalog. Properties with other signs than names have are given as `**{...}`."""
    return IcebergTable(open_catalog(catalog_uri, properties), identifier)


class IcebergTable:
    """One run's view of a table: what it found when it began, and what it adds."""

    def __init__(self, catalog: Catalog, identifier: str) -> None:
        if identifier.count(".") < 1:
            raise InputError(f"{identifier} is not the name of a table", hint="namespace.table")
        self.name = identifier
        self._catalog = catalog
        self._table: Table | None = None
        self._began_at: TargetState | None = None
        self._is_undecided = False

    @property
    def place(self) -> IcebergLocation:
        return IcebergLocation(tuple(sorted(self._loaded.io.properties.items())))

    @property
    def _loaded(self) -> Table:
        if self._table is None:
            raise InternalError("a table must be created before its files are written")
        return self._table

    @told_of_catalog()
    def begin(self) -> TargetState | None:
        self._table = _load(self._catalog, self.name)
        self._began_at = None if self._table is None else state_of(self._table)
        if self._table is not None and self._began_at is None and self._table.current_snapshot() is not None:
            raise InputError(f"{self.name} has data that tidelog did not write", hint="Name another table")
        return self._began_at

    @told_of_catalog()
    def prepare(self, shape: TableShape) -> None:
        if self._table is None:
            self._catalog.create_namespace_if_not_exists(self.name.rpartition(".")[0])
            self._table = self._catalog.create_table_if_not_exists(self.name, schema=shape.schema)

    def new_key(self, attempt: str, first_offset: int, number: int) -> str:
        return f"{self._loaded.location()}/data/tidelog-{first_offset:020}-{number:05}-{attempt}.parquet"

    def files(self) -> Sequence[str]:
        return data_files(self._loaded)

    @told_of_catalog()
    def commit(self, step: Step) -> None:
        try:
            for _ in range(_ATTEMPTS):
                if self._is_committed(step):
                    return
            raise ConflictError(
                f"gave up after {_ATTEMPTS} conflicting commits to {self.name}",
                hint="Run it again when other writers are done",
            )
        except ConflictError:
            if not self._is_undecided:  # else a commit without an answer may still refer to them
                self.discard(step.attempt, _new_files(step))
            raise

    def _is_committed(self, step: Step) -> bool:
        """One attempt; False if another writer changed the table, but not our part of it."""
        table = self._loaded.refresh()
        if _find_attempt(table, step.attempt):
            return True  # of an earlier attempt, whose answer was lost
        if state_of(table) != self._began_at:
            raise ConflictError(
                f"another run wrote this part of {self.name} first; this run committed nothing",
                hint="Run it again: it continues after the other run",
            )
        table.metadata.properties.update(_NO_RETRIES)  # of this copy: it is not sent anywhere
        try:
            with table.transaction() as transaction:
                _change(transaction, step, self._began_at)
        except CommitFailedException:
            return False
        except CommitStateUnknownException:
            self._is_undecided = True
            return False
        return True

    def discard(self, attempt: str, keys: Sequence[str]) -> None:
        if self._table is not None:
            _remove(self._table.io, keys)


def _load(catalog: Catalog, name: str) -> Table | None:
    try:
        return catalog.load_table(name)
    except NoSuchTableError:
        return None


def state_of(table: Table) -> TargetState | None:
    """What the newest snapshot of ours says, else the table itself; None for a table without anything of ours."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        summary = snapshot.summary.additional_properties if snapshot.summary is not None else {}
        if _STATE in summary:
            return _decoded(summary[_STATE], table)
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)
    return _decoded(table.properties[_STATE], table) if _STATE in table.properties else None


def _decoded(text: str, table: Table) -> TargetState:
    try:
        return msgspec.json.decode(text, type=TargetState)
    except msgspec.MsgspecError as error:
        raise DataError(f"the property {_STATE} of {'.'.join(table.name())} cannot be understood: {error}") from error


def data_files(table: Table) -> list[str]:
    """Where the table's rows are; NotSupportedError where some of the rows in them are deleted."""
    tasks = list(table.scan().plan_files())
    if any(task.delete_files for task in tasks):
        raise NotSupportedError(
            f"rows of {'.'.join(table.name())} were deleted by another writer", hint="Have its files rewritten first"
        )
    return [task.file.file_path for task in tasks]


def _new_files(step: Step) -> list[str]:
    return [*(part.key for part in step.written if part.went_in.messages), *(one.key for one in step.rewritten)]


def _find_attempt(table: Table, attempt: str) -> bool:
    return any(
        snapshot.summary is not None and snapshot.summary.additional_properties.get(_ATTEMPT) == attempt
        for snapshot in table.metadata.snapshots
    )


def _change(transaction: Transaction, step: Step, before: TargetState | None) -> None:
    """Columns, files and offsets, in one transaction."""
    state = TargetState(
        topic=step.topic,
        values=step.shape.values,
        columns=step.shape.columns,
        first_offset=step.first_offset if before is None else before.first_offset,
        next_offset=step.next_offset,
        partitions=step.partitions,
    )
    properties = {
        _STATE: msgspec.json.encode(state).decode(),
        _ATTEMPT: step.attempt,
        f"{_PREFIX}messages": str(step.proof.went_in.messages),
        f"{_PREFIX}checksum": step.proof.went_in.checksum,
    }
    _change_columns(transaction, step.shape, before)
    if step.rewritten:
        transaction.delete(AlwaysTrue(), snapshot_properties=properties)
    files = _new_files(step)
    if files:
        transaction.add_files(files, snapshot_properties=properties, check_duplicate_files=False)
    transaction.set_properties({_STATE: properties[_STATE]})


def _change_columns(transaction: Transaction, shape: TableShape, before: TargetState | None) -> None:
    schema = shape.schema
    replaced = [] if before is None else _replaced_columns(from_json(before.columns), shape.kind)
    if replaced:
        # Not all widenings are allowed in place: the column is dropped and added again, and every file is rewritten.
        with transaction.update_schema(allow_incompatible_changes=True) as update:
            for name in replaced:
                update.delete_column(name)
    with transaction.update_schema() as update:
        update.union_by_name(schema)


def _replaced_columns(known: pa.DataType, now: pa.DataType) -> list[str]:
    return [field.name for field in known if must_be_rewritten(field.type, now.field(field.name).type)]

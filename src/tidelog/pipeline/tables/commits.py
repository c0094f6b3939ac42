"""The commit log of a Parquet table: which files belong to the table, and which offset of its topic it has reached.

    <table>/part-...parquet                         what `spark.read.parquet` reads
    <table>/_common_metadata                        the schema, for readers that look at one file alone
    <table>/_tidelog/commit-0000000000.json         one commit: files added, files removed, offsets, schema
    <table>/_tidelog/staged-0000000000-<attempt>/   files staged for that commit

Invariants
- A commit exists if its document exists, which is made by a conditional create: of two runs one wins.
- Commits are numbered without a gap, and each begins at the offset at which the previous one ended. Of a topic with
  partitions these offsets only count what came in; `partitions` has where each of them begins and ends.
- Staged files have names that Spark does not list. After the commit they are copied to their final location beside the
  others, and deleted. The next run finishes this for a killed one; until then they are read where they are.
- Files staged for a number that is taken belong to a run that lost, or are published: they can be deleted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import ConflictError, DataError, NotFoundError
from tidelog.pipeline.jobs.job import Reconciliation
from tidelog.store.object_store import ObjectStore

FORMAT = 1
Values = Literal["raw", "json", "avro"]
Partitions = tuple[tuple[int, int], ...] | msgspec.UnsetType
"""The first offset that a table has of each partition, and the end (exclusive); unset for a topic without any."""
_PLACE = "_tidelog/"
_COMMIT = re.compile(r"_tidelog/commit-([0-9]{10})\.json")
_STAGED = re.compile(r"_tidelog/staged-([0-9]{10})-([0-9a-f]+)/([^/]+)")
_SCHEMA_FILE = "_common_metadata"
_FILE_NAME = re.compile(r"part-[0-9a-z-]+\.parquet")


class TableFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a table. Both offsets belong to it."""

    name: str
    rows: int
    bytes: int
    first_offset: int
    last_offset: int


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a table: the offsets from `first_offset` to `next_offset` (exclusive), and what they became."""

    format: int
    number: int
    attempt: str
    topic: str
    values: Values
    first_offset: int
    next_offset: int
    columns: dict[str, Any]
    added: tuple[TableFile, ...] = ()
    removed: tuple[str, ...] = ()
    proof: Reconciliation | None = None
    committed_us: int = 0
    partitions: Partitions = msgspec.UNSET


class TableState(msgspec.Struct, frozen=True, kw_only=True):
    """What all commits together make. Without any, `newest` is None."""

    newest: Commit | None
    first_offset: int
    files: tuple[TableFile, ...]
    replaced: tuple[str, ...]
    attempts: dict[int, str]

    @property
    def next_number(self) -> int:
        return 0 if self.newest is None else self.newest.number + 1


class TableCommits:
    """The commits below a store that is the table's directory."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    # Reading

    def state(self) -> TableState:
        """What is committed; DataError where commits do not follow each other."""
        files: dict[str, TableFile] = {}
        newest: Commit | None = None
        first_offset = 0
        replaced: list[str] = []
        attempts: dict[int, str] = {}
        for number in sorted(self._numbers()):
            commit = self._read(number)
            _check_follows(newest, commit)
            first_offset = commit.first_offset if newest is None else first_offset
            files.update((file.name, file) for file in commit.added)
            for name in commit.removed:
                files.pop(name, None)
            replaced += commit.removed
            newest, attempts[number] = commit, commit.attempt
        return TableState(
            newest=newest,
            first_offset=first_offset,
            files=tuple(files.values()),
            replaced=tuple(replaced),
            attempts=attempts,
        )

    def _numbers(self) -> list[int]:
        found = (_COMMIT.fullmatch(info.key) for info in self._store.list(_PLACE))
        return [int(match[1]) for match in found if match is not None]

    def _read(self, number: int) -> Commit:
        key = _commit_key(number)
        try:
            commit = msgspec.json.decode(self._store.get(key).data, type=Commit)
        except JSON_ERRORS as error:
            raise DataError(f"the commit {key} cannot be understood: {error}", path=self._store.url) from error
        is_ours = commit.format == FORMAT and commit.number == number and commit.first_offset <= commit.next_offset
        if not is_ours or not all(_FILE_NAME.fullmatch(name) for name in _names(commit)):
            raise DataError(f"the commit {key} is inconsistent", path=self._store.url)
        return commit

    def keys_of(self, state: TableState) -> list[str]:
        """Where the files of the table are at this moment: in their place, or still staged by a run that was killed."""
        published = {info.key for info in self._store.list() if "/" not in info.key}
        staged = self._staged(state)
        missing = [file.name for file in state.files if file.name not in published and file.name not in staged]
        if missing:
            raise DataError(f"the table's file {missing[0]} is missing", path=self._store.url)
        return [file.name if file.name in published else staged[file.name] for file in state.files]

    def _staged(self, state: TableState) -> dict[str, str]:
        """By name, what the runs have staged that won."""
        found = (_STAGED.fullmatch(info.key) for info in self._store.list(_PLACE))
        return {m[3]: m[0] for m in found if m is not None and state.attempts.get(int(m[1])) == m[2]}

    # Writing

    def commit(self, commit: Commit) -> None:
        """Makes it count; ConflictError when another run was first."""
        key = _commit_key(commit.number)
        data = msgspec.json.format(msgspec.json.encode(commit), indent=1)
        try:
            self._store.put_if_absent(key, data)
        except ConflictError as error:
            if self._read(commit.number).attempt == commit.attempt:
                return  # an earlier answer was lost, and it was our own write
            raise ConflictError(
                "another run wrote this part of the table first; this run committed nothing",
                path=self._store.url,
                hint="Run it again: it continues after the other run",
            ) from error

    def finish(self, state: TableState, schema_file: bytes | None) -> None:
        """Brings what is committed to its place, and removes what belongs to nothing. Can be done again at any time."""
        staged = self._staged(state)
        names = {file.name for file in state.files}
        for name, key in staged.items():
            if name in names and not self._exists(name):
                self._publish(key, name)
        if schema_file is not None and staged:
            self._store.put(_SCHEMA_FILE, schema_file)
        # By name, from the commits: another run may have published files that this state does not know of.
        self._store.delete(state.replaced)
        over = {info.key for info in self._store.list(_PLACE) if self._is_over(info.key, state)}
        self._store.delete(sorted(over))
        for folder in sorted({key.rpartition("/")[0] for key in over}):
            self._store.remove_folder(f"{folder}/")
        uploads = self._store.unfinished_uploads(_PLACE)
        self._store.delete_unfinished([one for one in uploads if self._is_over(one.key, state)])

    def _publish(self, key: str, name: str) -> None:
        try:
            self._store.copy(key, name)
        except NotFoundError:
            if not self._exists(name):  # else another run has done it meanwhile, and has cleared away
                raise

    def _is_over(self, key: str, state: TableState) -> bool:
        match = _STAGED.fullmatch(key)
        return match is not None and int(match[1]) < state.next_number

    def discard(self, number: int, attempt: str) -> None:
        """Removes what a run has staged that was not committed."""
        prefix = staged_prefix(number, attempt)
        self._store.delete([info.key for info in self._store.list(prefix)])
        self._store.remove_folder(prefix)

    def _exists(self, key: str) -> bool:
        try:
            self._store.head(key)
        except NotFoundError:
            return False
        return True


def staged_prefix(number: int, attempt: str) -> str:
    """Where a run puts the files of a commit."""
    return f"{_PLACE}staged-{number:010}-{attempt}/"


def _commit_key(number: int) -> str:
    return f"{_PLACE}commit-{number:010}.json"


def _names(commit: Commit) -> Sequence[str]:
    return [*(file.name for file in commit.added), *commit.removed]


def _check_follows(before: Commit | None, commit: Commit) -> None:
    expected = (0, commit.first_offset) if before is None else (before.number + 1, before.next_offset)
    if (commit.number, commit.first_offset) != expected:
        raise DataError(
            f"the table's commit {commit.number} begins at offset {commit.first_offset}, not at {expected[1]}",
            hint="A commit is missing: put it back from a copy, or make the table again in another place",
        )

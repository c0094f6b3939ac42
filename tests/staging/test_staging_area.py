"""Handing rows over: committed once for each version, whoever does it again, and in whatever order answers come."""

from __future__ import annotations

import threading

import pytest
from tests.cold.published import KEYS
from tests.staging.staged_commits import area_of, hand_over, rows, stage

from tidelog.errors import BackpressureError, ConflictError, DataError, InputError, StoreUnavailableError
from tidelog.staging import document as documents
from tidelog.staging.area import StagingArea
from tidelog.staging.document import Applied, StagedCommit, StagingDocument, decode_staging, encode_staging
from tidelog.testing import FaultyMetadata, FaultyStore


@pytest.fixture
def objects() -> FaultyStore:
    return FaultyStore()


@pytest.fixture(params=[True, False], ids=["multi-key", "single-key"])
def metadata(request: pytest.FixtureRequest) -> FaultyMetadata:
    return FaultyMetadata(multi_key=request.param)


@pytest.fixture
def area(objects: FaultyStore, metadata: FaultyMetadata) -> StagingArea:
    return area_of(objects, metadata)


def document_in(metadata: FaultyMetadata) -> StagingDocument:
    return decode_staging(metadata.contents()[KEYS.staging], KEYS.staging)


def staged_commit(app: str, version: int, **changes: object) -> StagedCommit:
    known = {"id": f"{app}-{version}", "manifest": "m", "checksum": "c", "rows": 10, "bytes": 100, "committed_us": 1}
    return StagedCommit(app=app, version=version, **{**known, **changes})  # type: ignore[arg-type]


def test_a_version_is_committed_once(area: StagingArea, metadata: FaultyMetadata) -> None:
    """The second commit of a version changes nothing, and neither does one of an older version."""
    assert hand_over(area, "etl", 4, rows(4, 3)) == "committed"
    before = metadata.contents()
    assert hand_over(area, "etl", 4, rows(4, 3)) == "already committed"
    assert hand_over(area, "etl", 3, rows(3, 3)) == "already committed"
    assert metadata.contents() == before


def test_a_commit_after_a_version_that_is_not_the_newest_is_refused(area: StagingArea) -> None:
    """Whoever chose rows by what was committed hears of it when that has changed; nothing is committed then."""
    assert area.newest("nightly") == -1
    area.commit("nightly", 3, [], after=-1)
    assert area.commit("nightly", 3, [], after=-1) == "already committed"
    with pytest.raises(ConflictError):
        area.commit("nightly", 5, [], after=-1)
    assert area.newest("nightly") == 3
    assert area.commit("nightly", 5, [], after=3) == "committed"


def test_a_document_that_never_was_knows_nothing(area: StagingArea) -> None:
    """What was never committed is unknown, and waiting for it says so at once."""
    assert area.status("etl", 0).state == "unknown"
    with pytest.raises(DataError, match="never committed"):
        area.wait("etl", 0, timeout_seconds=60)


def test_waiting_ends_with_the_time(area: StagingArea) -> None:
    """Nobody takes it in: the status says how far it is."""
    hand_over(area, "etl", 0, rows(0, 1))
    assert area.wait("etl", 0, timeout_seconds=0.05).state == "pending"


@pytest.mark.parametrize("fault", ["unavailable", "unanswered", "late"])
def test_a_commit_without_an_answer_is_made_once(
    area: StagingArea, metadata: FaultyMetadata, fault: documents.State
) -> None:
    """Whether the store did it, will do it or did not: the version is in the document once."""
    parts = stage(area, "etl", 0, rows(0, 3))
    metadata.fail("commit", fault)  # type: ignore[arg-type]
    assert area.commit("etl", 0, parts) == "committed"
    metadata.land_late_writes()
    assert [one.version for one in document_in(metadata).pending] == [0]


def test_a_store_that_never_answers_is_told(area: StagingArea, metadata: FaultyMetadata) -> None:
    """The error is that of the store: it is not known whether it was done."""
    parts = stage(area, "etl", 0, rows(0, 3))
    metadata.fail("commit", times=None)
    with pytest.raises(StoreUnavailableError):
        area.commit("etl", 0, parts)


def test_many_writers_commit_at_once(objects: FaultyStore, metadata: FaultyMetadata) -> None:
    """None is lost, whoever is faster."""

    def write(app: str) -> None:
        mine = area_of(objects.another_client(), metadata.another_client())
        for version in range(5):
            hand_over(mine, app, version, rows(version, 1))

    threads = [threading.Thread(target=write, args=(f"app-{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    committed = [(one.app, one.version) for one in document_in(metadata).pending]
    assert sorted(committed) == sorted((f"app-{number}", version) for number in range(6) for version in range(5))
    for number in range(6):
        assert [version for app, version in committed if app == f"app-{number}"] == list(range(5))


def test_discarding_removes_what_was_staged(area: StagingArea, objects: FaultyStore) -> None:
    """All attempts of the version go, and nothing else."""
    stage(area, "etl", 0, rows(0, 3), parts=3)
    kept = stage(area, "etl", 1, rows(1, 1))
    assert area.discard("etl", 0) == 3
    assert list(objects.contents()) == [kept[0].key]


def test_discarding_never_touches_what_is_committed(area: StagingArea, objects: FaultyStore) -> None:
    """Spark may abort after a commit that succeeded."""
    hand_over(area, "etl", 0, rows(0, 3))
    before = objects.contents()
    assert area.discard("etl", 0) == 0
    assert objects.contents() == before


def test_a_late_commit_does_not_land_behind_a_discard(area: StagingArea, metadata: FaultyMetadata) -> None:
    """Loses, otherwise: the rows of a version that counts as committed."""
    parts = stage(area, "etl", 0, rows(0, 3))
    metadata.fail("commit", "late")
    metadata.fail("commit", nth=2, times=None)
    with pytest.raises(StoreUnavailableError):
        area.commit("etl", 0, parts)
    metadata.heal()
    area.discard("etl", 0)
    metadata.land_late_writes()
    assert area.status("etl", 0).state == "unknown"


@pytest.mark.parametrize("app", ["", "a\nb", "x" * 201, "\ud800"])
def test_an_application_has_a_name_that_can_be_written(area: StagingArea, app: str) -> None:
    """Whatever cannot be is refused before anything is staged."""
    with pytest.raises(InputError):
        area.part_key(app, 0, 0, "a")


def test_parts_of_another_version_are_refused(area: StagingArea) -> None:
    """They would be removed with that version."""
    parts = stage(area, "etl", 0, rows(0, 1))
    with pytest.raises(InputError):
        area.commit("etl", 1, parts)
    with pytest.raises(InputError):
        area.commit("etl", 0, parts * 2)


def test_a_version_behind_a_refused_one_is_not_committed(area: StagingArea, metadata: FaultyMetadata) -> None:
    """A stream must not go on as if nothing were missing; written again or given up, it does."""
    hand_over(area, "etl", 0, rows(0, 1))
    refused = document_in(metadata)
    metadata.put(KEYS.staging, encode_staging(refused.refuse(refused.pending[0].id, "a part is missing", 5)))
    assert area.status("etl", 0) == documents.StagingStatus("refused", error="a part is missing")
    with pytest.raises(DataError, match="version 0 of etl was refused"):
        hand_over(area, "etl", 1, rows(1, 1))
    with pytest.raises(DataError, match="a part is missing"):
        area.wait("etl", 0, timeout_seconds=1)
    assert hand_over(area, "other", 0, rows(1, 1)) == "committed"
    assert hand_over(area, "etl", 0, rows(0, 1)) == "committed"
    assert area.status("etl", 0).state == "pending"
    assert not area.give_up("etl", 0)


def test_a_refused_version_can_be_given_up(area: StagingArea, metadata: FaultyMetadata) -> None:
    """Later ones go on then."""
    hand_over(area, "etl", 0, rows(0, 1))
    refused = document_in(metadata)
    metadata.put(KEYS.staging, encode_staging(refused.refuse(refused.pending[0].id, "a part is missing", 5)))
    assert area.give_up("etl", 0)
    assert hand_over(area, "etl", 1, rows(1, 1)) == "committed"


def test_too_many_that_wait_are_refused() -> None:
    """The document is bounded: nothing is committed that does not fit."""
    full = StagingDocument(pending=tuple(staged_commit("a", version) for version in range(documents.MAX_PENDING)))
    with pytest.raises(BackpressureError, match="1000 consignments wait"):
        full.committed(staged_commit("b", 0))


def test_the_applications_that_wrote_longest_ago_are_forgotten() -> None:
    """Those that never come back first: a stream is not forgotten because of many batch jobs."""
    document = StagingDocument(applied={"stream": Applied(7, 0, 10, taken_us=0)})
    for number in range(documents.MAX_APPLIED_ONCE + 20):
        one = staged_commit(f"once-{number}", 0, is_once=True, first_offset=0)
        document = document.committed(one).taken(one.id, now_us=number + 1).without([one.id])
    assert document.status("stream", 7).state == "taken"
    assert len(document.applied) == documents.MAX_APPLIED_ONCE + 1
    assert "once-0" not in document.applied


def test_a_document_stays_below_the_bound_of_the_store() -> None:
    """Long names make it forget sooner."""
    names = {f"{number:04d}".ljust(200, "x"): Applied(1, 2**63, 2**63, number) for number in range(3999)}
    document = StagingDocument(applied=names)
    one = staged_commit("new", 0, first_offset=0)
    document = document.committed(one).taken(one.id, now_us=10_000)
    assert len(encode_staging(document)) < 1 << 20
    assert "new" in document.applied


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b'{"pending": [{}]}', b'{"pending": 5}', encode_staging(StagingDocument()).replace(b"[]", b"3")],
)
def test_a_document_that_makes_no_sense_is_refused(data: bytes) -> None:
    """It names the key, and what to do."""
    with pytest.raises(DataError, match="somewhere in the metadata store"):
        decode_staging(data, "somewhere")


def test_numbers_that_cannot_be_are_refused() -> None:
    """Nothing is believed because it is in our store."""
    for changes in ({"rows": -1}, {"first_offset": -5}, {"is_taken": True}):
        damaged = StagingDocument(pending=(staged_commit("a", 0, **changes),))
        with pytest.raises(DataError, match="makes no sense"):
            decode_staging(encode_staging(damaged), "somewhere")

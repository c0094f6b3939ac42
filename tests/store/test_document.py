"""A document that many change: one contract over every metadata store, with races, lost answers and fences."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tests.contracts.test_metadata_store import KINDS, open_kind, writers_of

from tidelog.errors import ConflictError, DataError, FencedError, RetryError, StoreUnavailableError
from tidelog.store import document as module
from tidelog.store.document import Step, UnchangedNeighbours, VersionedDocument, decode_json, encode_json, retried
from tidelog.store.metadata.base import MetadataStore
from tidelog.testing import FaultyMetadata


class Counter(msgspec.Struct, frozen=True):
    """What is counted here, and by whom last."""

    count: int
    by: str = ""


def decode(data: bytes, key: str) -> Counter:
    try:
        return msgspec.json.decode(data, type=Counter)
    except msgspec.MsgspecError as error:
        raise DataError(f"{key} is no counter: {error}") from error


def document_in(metadata: MetadataStore, key: str = "counter", **options: object) -> VersionedDocument[Counter]:
    return VersionedDocument(metadata, key, msgspec.json.encode, decode, **options)  # type: ignore[arg-type]


def one_more(known: Counter | None) -> Counter:
    return Counter(1 if known is None else known.count + 1)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[MetadataStore]:
    with open_kind(request.param, request) as opened:
        yield opened


@pytest.fixture
def key() -> str:
    """One that no other test uses."""
    return f"test-{secrets.token_hex(8)}/counter"


@pytest.fixture(params=[True, False], ids=["multi-key", "single-key"])
def faulty(request: pytest.FixtureRequest) -> FaultyMetadata:
    return FaultyMetadata(multi_key=request.param)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting; always as long as chance allows."""
    found: list[float] = []
    own, sleep = threading.current_thread(), time.sleep

    def pause(seconds: float) -> None:
        if threading.current_thread() is own:
            found.append(seconds)
        else:
            sleep(seconds)  # a thread that another test has left: `time` is one module for all

    monkeypatch.setattr("tidelog.store.document.time.sleep", pause)
    monkeypatch.setattr("tidelog.store.document.jittered", lambda seconds, least: seconds)
    return found


class TestEveryStore:
    """What holds wherever the document is kept."""

    def test_it_is_created_read_replaced_and_deleted(self, store: MetadataStore, key: str) -> None:
        """Each on the version that was read."""
        document = document_in(store, key)
        assert document.read() is None
        created = document.create(Counter(7))
        first = document.read()
        assert first is not None
        assert first.value == Counter(7)
        assert first.version == created
        replaced = document.replace(Counter(8), first.version)
        with pytest.raises(ConflictError):
            document.replace(Counter(9), first.version)
        with pytest.raises(ConflictError):
            document.create(Counter(9))
        found = document.read()
        assert found is not None
        assert found == (Counter(8), replaced)
        document.delete()
        document.delete()
        assert document.read() is None

    def test_an_update_returns_what_it_wrote(self, store: MetadataStore, key: str) -> None:
        """From nothing, and from what is there."""
        document = document_in(store, key)
        assert document.update(one_more) == Counter(1)
        assert document.update(one_more) == Counter(2)
        found = document.read()
        assert found is not None
        assert found.value == Counter(2)

    def test_nothing_is_written_where_nothing_changes(self, store: MetadataStore, key: str) -> None:
        """The version stays, unless a new one is what is wanted."""
        document = document_in(store, key)
        assert document.update(lambda known: known) is None
        document.create(Counter(3))
        before = document.read()
        assert document.update(lambda known: known) == Counter(3)
        assert document.update(lambda known: None) is None
        assert document.read() == before
        assert document.update(lambda known: known, rewrites=True) == Counter(3)
        after = document.read()
        assert before is not None
        assert after is not None
        assert after.value == before.value
        assert after.version != before.version

    def test_who_loses_a_race_decides_again(self, store: MetadataStore, key: str) -> None:
        """On what the other one wrote."""
        other = document_in(store, key)
        seen: list[Counter | None] = []

        def change(known: Counter | None) -> Counter:
            seen.append(known)
            if len(seen) < 3:
                other.update(one_more)
            return one_more(known)

        assert document_in(store, key).update(change) == Counter(3)
        assert seen == [None, Counter(1), Counter(2)]

    def test_who_deletes_meanwhile_is_noticed(self, store: MetadataStore, key: str) -> None:
        """What is gone is not brought back from what was read."""
        document = document_in(store, key)
        document.create(Counter(5))
        seen: list[Counter | None] = []

        def change(known: Counter | None) -> Counter:
            seen.append(known)
            if len(seen) == 1:
                document_in(store, key).delete()
            return one_more(known)

        assert document.update(change) == Counter(1)
        assert seen == [Counter(5), None]

    def test_all_who_count_at_once_are_counted(self, store: MetadataStore, key: str) -> None:
        """No change is lost, and none is made twice."""
        writers, rounds = writers_of(store), 2 if "s3:" in store.url else 5

        def count(_: int) -> None:
            for _ in range(rounds):
                document_in(store, key, attempts=200).update(one_more)

        with ThreadPoolExecutor(writers) as pool:
            list(pool.map(count, range(writers)))
        found = document_in(store, key).read()
        assert found is not None
        assert found.value == Counter(writers * rounds)

    def test_a_neighbour_that_was_changed_is_a_lost_race(self, store: MetadataStore, key: str) -> None:
        """The decision was made on it; where one key changes at a time, only the document itself is checked."""
        neighbour, fence = document_in(store, f"{key}-limit"), UnchangedNeighbours(store)
        neighbour.create(Counter(10))
        seen: list[int] = []

        def change(known: Counter | None) -> Counter:
            limit = neighbour.read()
            assert limit is not None
            fence.expect(neighbour.key, limit.version)
            seen.append(limit.value.count)
            if len(seen) == 1:
                neighbour.update(one_more)
            return limit.value

        written = document_in(store, key, fence=fence).update(change)
        assert seen == ([10, 11] if store.supports_multi_key else [10])
        assert written == Counter(seen[-1])


def test_what_a_change_raises_is_final(faulty: FaultyMetadata) -> None:
    """Also a ConflictError of its own: it is not taken for a lost race."""
    calls: list[Counter | None] = []

    def refuse(known: Counter | None) -> Counter:
        calls.append(known)
        raise ConflictError("somebody has handed over more meanwhile")

    with pytest.raises(ConflictError, match="handed over more"):
        document_in(faulty).update(refuse)
    assert calls == [None]
    assert faulty.contents() == {}


def test_what_cannot_be_understood_is_not_overwritten(faulty: FaultyMetadata) -> None:
    """The error is that of the decoder, which knows the key."""
    faulty.put("counter", b"not json")
    with pytest.raises(DataError, match="counter is no counter"):
        document_in(faulty).update(one_more)
    assert faulty.contents() == {"counter": b"not json"}


@pytest.mark.parametrize("gave_up", [ConflictError, RetryError])
def test_it_is_given_up_after_so_many_conflicts(
    faulty: FaultyMetadata, pauses: list[float], gave_up: type[ConflictError]
) -> None:
    """With the error that the document was made with, which says how often and where."""
    faulty.fail("commit", "conflict", times=None)
    with pytest.raises(gave_up, match="gave up after 6 conflicting writes to counter") as caught:
        document_in(faulty, attempts=6, gave_up=gave_up).update(one_more)
    assert isinstance(caught.value.__cause__, ConflictError)
    assert faulty.contents() == {}
    assert pauses == [0.0, 0.01, 0.02, 0.03, 0.04]


def test_pauses_have_an_end(faulty: FaultyMetadata, pauses: list[float]) -> None:
    """However many others there are."""
    faulty.fail("commit", "conflict", times=99)
    assert document_in(faulty, attempts=100).update(one_more) == Counter(1)
    assert max(pauses) == module.LONGEST_PAUSE_SECONDS


def test_deleting_is_given_up_too(faulty: FaultyMetadata, pauses: list[float]) -> None:
    """And leaves what is there."""
    document_in(faulty).create(Counter(1))
    faulty.fail("commit", "conflict", times=None)
    with pytest.raises(ConflictError, match=f"gave up after {module.ATTEMPTS} conflicting writes to counter"):
        document_in(faulty).delete()
    assert list(faulty.contents()) == ["counter"]


@pytest.mark.parametrize(("fault", "count"), [("unavailable", None), ("unanswered", 1), ("late", None)])
def test_a_lost_answer_is_told(faulty: FaultyMetadata, fault: str, count: int | None) -> None:
    """It is not known whether it was written: only who made the change knows whether it may be made again."""
    faulty.fail("commit", fault)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailableError):
        document_in(faulty).update(one_more)
    found = document_in(faulty).read()
    assert (None if found is None else found.value.count) == count


@pytest.mark.parametrize("fault", ["unavailable", "unanswered", "late"])
def test_a_change_that_knows_its_own_work_is_made_once(faulty: FaultyMetadata, pauses: list[float], fault: str) -> None:
    """Whether the store did it, will do it or did not."""

    def mine(known: Counter | None) -> Counter:
        return known if known is not None and known.by == "me" else Counter(one_more(known).count, by="me")

    document = document_in(faulty, unanswered_attempts=4)
    faulty.fail("commit", fault, times=2)  # type: ignore[arg-type]
    assert document.update(mine) == Counter(1, by="me")
    faulty.land_late_writes()
    found = document.read()
    assert found is not None
    assert found.value == Counter(1, by="me")
    assert pauses == ([0.04] if fault == "unanswered" else [0.04, 0.16])


def test_a_store_that_never_answers_is_told(faulty: FaultyMetadata, pauses: list[float]) -> None:
    """With its own error, after so many attempts."""
    faulty.fail("commit", times=None)
    with pytest.raises(StoreUnavailableError):
        document_in(faulty, unanswered_attempts=4).update(one_more)
    assert len(pauses) == 3


class Epoch:
    """A fence that is taken away."""

    def __init__(self, metadata: MetadataStore) -> None:
        self.is_held = True
        self._plain = UnchangedNeighbours(metadata)

    def change(self, steps: Sequence[Step]) -> Mapping[str, str]:
        if not self.is_held:
            raise FencedError("another node owns it now")
        return self._plain.change(steps)


@pytest.mark.parametrize("act", ["update", "replace", "delete"])
def test_without_the_right_nothing_is_written(faulty: FaultyMetadata, act: str) -> None:
    """The fence's error is final."""
    fence = Epoch(faulty)
    document = document_in(faulty, fence=fence)
    assert document.update(one_more) == Counter(1)
    before, found = faulty.contents(), document.read()
    assert found is not None
    fence.is_held = False
    acts: dict[str, Callable[[], object]] = {
        "update": lambda: document.update(one_more),
        "replace": lambda: document.replace(Counter(9), found.version),
        "delete": document.delete,
    }
    with pytest.raises(FencedError):
        acts[act]()
    assert faulty.contents() == before


def test_a_change_of_several_documents_is_made_again_as_a_whole(faulty: FaultyMetadata, pauses: list[float]) -> None:
    """As long as others are first, within bounds."""
    faulty.fail("commit", "conflict", times=2)
    assert retried(lambda: faulty.put("a", b"1"), "topic/") == "1"
    faulty.fail("commit", "conflict", times=None)
    with pytest.raises(ConflictError, match=f"gave up after {module.ATTEMPTS} conflicting writes to topic/"):
        retried(lambda: faulty.put("a", b"2"), "topic/")
    assert faulty.contents() == {"a": b"1"}


class Inner(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a document."""

    size: int = 0


class Outer(msgspec.Struct, frozen=True, omit_defaults=True):
    """As an older version knows it."""

    count: int = 0
    inner: Inner = Inner()


def test_a_change_by_an_older_version_keeps_the_fields_of_a_newer_one(faulty: FaultyMetadata) -> None:
    """Lost what a newer node had written: nodes of two versions share documents while an installation is upgraded."""
    faulty.put("outer", b'{"count":1,"newer":{"a":[1]},"inner":{"size":2,"unit":"kB"}}')
    document = VersionedDocument(faulty, "outer", encode_json, lambda data, key: decode_json(data, key, Outer))
    document.update(lambda known: Outer(count=0, inner=Inner()))
    found = faulty.get("outer")
    assert found is not None
    assert msgspec.json.decode(found.value) == {"newer": {"a": [1]}, "inner": {"unit": "kB"}}


@pytest.mark.parametrize("before", [None, b"[]", b"no json", b'{"count":3}'])
def test_what_has_no_other_fields_is_written_as_it_is(before: bytes | None) -> None:
    """Whatever was there."""
    assert encode_json(Outer(count=4), before) == b'{"count":4}'

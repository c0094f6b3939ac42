"""The bucket as metadata store: servers that cannot be trusted are refused, and lost answers do no harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Barrier

import pytest
from obstore.store import MemoryStore
from tests.log.workbench import LIMIT_SECONDS
from tests.servers import S3Server

from tidelog.errors import AccessDeniedError, ConfigError, ConflictError, DataError, InputError, StoreUnavailableError
from tidelog.store.metadata import Check, Delete, Put
from tidelog.store.metadata import base as undecided
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.obstore import ObstoreStore
from tidelog.store.urls import open_store
from tidelog.testing import FaultyStore


class ChangedStore(ObstoreStore):
    """A store in memory, for servers that behave differently."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "memory://", None)


class CannotReplace(ChangedStore):
    supports_conditional_update = False


class IgnoresIfNoneMatch(ChangedStore):
    def put_if_absent(self, key: str, data: bytes) -> str:
        return self.put(key, data)


class IgnoresIfMatch(ChangedStore):
    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return self.put(key, data)


class CreatesOnIfMatch(ChangedStore):
    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        there = [info.key for info in self.list(key.rpartition("/")[0] + "/")]
        return super().put_if_match(key, data, etag) if key in there else self.put(key, data)


class RefusesEverything(ChangedStore):
    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        raise ConflictError("always")


class ForgetsWrites(ChangedStore):
    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return etag + "-new"


class LosesAnswers(ChangedStore):
    """Does what it is asked and does not say so, as often as `lost` says."""

    lost = 0

    def put(self, key: str, data: bytes) -> str:
        return self._answer(super().put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._answer(super().put_if_absent(key, data))

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return self._answer(super().put_if_match(key, data, etag))

    def _answer(self, etag: str) -> str:
        if self.lost:
            self.lost -= 1
            raise StoreUnavailableError("no answer")
        return etag


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undecided, "FIRST_PAUSE_SECONDS", 0.0)


class TestProbe:
    """Before the first write."""

    @pytest.mark.parametrize(
        "kind", [IgnoresIfNoneMatch, IgnoresIfMatch, CreatesOnIfMatch, RefusesEverything, ForgetsWrites]
    )
    def test_a_server_that_ignores_conditions_is_refused(self, kind: type[ChangedStore]) -> None:
        """Two owners would overwrite each other there. Nothing stays behind."""
        objects = kind()
        with pytest.raises(ConfigError, match="cannot hold metadata"):
            BucketMetadataStore(objects)
        assert list(objects.list()) == []

    def test_a_store_without_conditions_is_refused(self) -> None:
        """It says itself that it cannot replace on a condition, and the error names what can be used."""
        with pytest.raises(ConfigError, match="sqlite"):
            BucketMetadataStore(CannotReplace())

    def test_a_directory_is_accepted_and_left_clean(self, tmp_path: Path) -> None:
        """A log on a shared directory needs no other store."""
        objects = open_store(f"file://{tmp_path}")
        BucketMetadataStore(objects).close()
        assert list(objects.list()) == []
        assert list(objects.unfinished_uploads()) == []

    def test_a_real_server_is_accepted_and_left_clean(self, s3_server: S3Server) -> None:
        """The object of the probe is removed."""
        objects = open_store(s3_server.url("probed"), s3_server.settings(), {})
        BucketMetadataStore(objects).close()
        assert list(objects.list()) == []

    def test_wrong_keys_are_not_taken_for_a_bad_server(self, s3_server: S3Server) -> None:
        """The error says what is wrong."""
        objects = open_store(s3_server.url("probed"), s3_server.settings(store_access_key_id="nobody"), {})
        with pytest.raises(AccessDeniedError):
            BucketMetadataStore(objects)


class TestLostAnswers:
    """The server did it; nobody heard."""

    @pytest.mark.parametrize("lost", [1, 2, 3])
    def test_the_writer_finds_its_write(self, lost: int) -> None:
        """Creating, replacing, deleting, making anew and putting succeed as if the answer had come."""
        objects = LosesAnswers()
        with BucketMetadataStore(objects) as store:
            objects.lost = lost
            first = store.commit([Check("a", None)], [Put("a", b"1")])["a"]
            objects.lost = lost
            second = store.commit([Check("a", first)], [Put("a", b"2")])["a"]
            assert store.get("a") == ("a", b"2", second)
            objects.lost = lost
            store.commit([Check("a", second)], [Delete("a")])
            assert store.get("a") is None
            objects.lost = lost
            third = store.commit([Check("a", None)], [Put("a", b"3")])["a"]
            assert store.get("a") == ("a", b"3", third)
            objects.lost = lost
            fourth = store.put("a", b"4")
            assert store.get("a") == ("a", b"4", fourth)


def test_many_keys_are_removed_at_once_and_leave_nothing() -> None:
    """Each takes a request, which waits here for another one; what they left behind is deleted with one request."""
    objects, meeting = FaultyStore(), Barrier(2)

    def meet(operation: str, _: str) -> None:
        if operation == "put_if_match":
            meeting.wait(LIMIT_SECONDS)

    with BucketMetadataStore(objects) as store:
        versions = {key: store.put(key, b"x") for key in "abcdefgh"}
        objects.reset_traffic()
        objects.on_request = meet
        store.remove_many(versions)
    assert objects.traffic.requests == {"put_if_match": 8, "delete": 1}
    assert not objects.contents().keys() & versions.keys()


class TestHostileBytes:
    """Objects that somebody else put there."""

    def test_what_tidelog_did_not_write_is_named(self) -> None:
        """It is neither served nor taken for a missing entry."""
        objects = ChangedStore()
        objects.put("in/a", b'{"start": "0"}')
        with BucketMetadataStore(objects) as store:
            uses: list[Callable[[], object]] = [
                lambda: store.get("in/a"),
                lambda: store.range("in/"),
                lambda: store.floor("in/", "in/b"),
                lambda: store.commit([Check("in/a", None)], [Put("in/a", b"")]),
            ]
            for use in uses:
                with pytest.raises(DataError, match="in/a"):
                    use()


def test_a_reader_needs_no_right_to_write() -> None:
    """Nothing is probed, everything is read, every write is refused."""
    objects = ChangedStore()
    with BucketMetadataStore(objects) as store:
        store.put("in/a", b"hello")
    before = list(objects.list())
    with BucketMetadataStore(objects, read_only=True) as store:
        assert [entry.value for entry in store.range("in/")] == [b"hello"]
        with pytest.raises(InputError, match="reading only"):
            store.put("in/a", b"no")
    assert list(objects.list()) == before

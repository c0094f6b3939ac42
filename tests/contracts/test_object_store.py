"""One suite for everything that calls itself an object store: memory, a directory, and a real S3 server."""

from __future__ import annotations

import os
import pickle
import secrets
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.campaign import IS_DEEP, examples
from tests.servers import S3Server

from tidelog.errors import ClosedError, ConflictError, InputError, NotFoundError, StoreUnavailableError
from tidelog.store.object_store import ObjectStore, ObjectWriter
from tidelog.store.settings import DEFAULT_PART_BYTES as PART_BYTES
from tidelog.store.urls import open_store
from tidelog.testing.faulty_store import FaultyStore

WRITERS = 8


@pytest.fixture(params=["memory", "faulty", "directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store."""
    if request.param == "memory":
        return open_store("memory://")
    if request.param == "faulty":
        return FaultyStore()
    if request.param == "directory":
        return open_store(f"file://{tmp_path}/objects")
    return s3_store(request.getfixturevalue("s3_server"))


def s3_store(server: S3Server, **settings: object) -> ObjectStore:
    """A prefix that nobody else uses."""
    return open_store(server.url(f"store-{secrets.token_hex(8)}"), server.settings(**settings), {})


def keys_of(store: ObjectStore, prefix: str = "", start_after: str | None = None) -> list[str]:
    return [info.key for info in store.list(prefix, start_after=start_after)]


def rounds_of(store: ObjectStore) -> int:
    """As few as there are writers."""
    return examples(1 if store.url.startswith("s3:") else 5)


def writers_of(store: ObjectStore) -> int:
    """SeaweedFS makes those who lose wait for seconds."""
    return 3 if "s3:" in store.url and not IS_DEEP else WRITERS


def winners(store: ObjectStore, attempt: Callable[[int], object]) -> list[int]:
    """Which of the writers that start together do not lose against another."""
    writers = writers_of(store)
    together = threading.Barrier(writers)

    def run(number: int) -> bool:
        together.wait()
        try:
            attempt(number)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(writers) as pool:
        return [number for number, won in enumerate(pool.map(run, range(writers))) if won]


class TestWholeObjects:
    """Small objects."""

    def test_what_was_put_can_be_read(self, store: ObjectStore) -> None:
        """Content, size and etag are the same however they are asked for."""
        etag = store.put("a/b", b"hello")
        assert store.get("a/b") == (b"hello", etag)
        info = store.head("a/b")
        assert (info.key, info.size, info.etag) == ("a/b", 5, etag)
        assert info.modified_us > 1_600_000_000_000_000

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        """It is not taken for a missing one."""
        store.put("empty", b"")
        assert store.get("empty").data == b""
        assert bytes(store.read_range("empty", 0, 10)) == b""
        assert keys_of(store) == ["empty"]

    def test_putting_again_replaces(self, store: ObjectStore) -> None:
        """The etag changes with the content."""
        first = store.put("a", b"first")
        second = store.put("a", b"second, longer")
        assert first != second
        assert store.get("a") == (b"second, longer", second)

    def test_what_is_missing_is_not_found(self, store: ObjectStore) -> None:
        """However it is asked for."""
        store.put("there/too", b"")
        uses: list[Callable[[str], object]] = [
            store.get,
            store.head,
            lambda key: store.read_range(key, 0, 1),
            lambda key: store.copy(key, "copied"),
        ]
        for use in uses:
            for key in ("none", "there", "there/none", "there/too/below"):
                with pytest.raises(NotFoundError):
                    use(key)

    def test_deleting(self, store: ObjectStore) -> None:
        """What is not there may be deleted too, alone and among others."""
        for key in ("a", "b/c", "b/d"):
            store.put(key, b"x")
        store.delete("none")
        store.delete("b")
        store.delete("a/below")
        assert keys_of(store) == ["a", "b/c", "b/d"]
        store.delete(["a", "none", "b/c", "none/too"])
        store.delete([])
        assert keys_of(store) == ["b/d"]

    def test_a_copy_is_an_object_of_its_own(self, store: ObjectStore) -> None:
        """It outlives its source, and replaces what was in its place."""
        store.put("a", b"one")
        store.put("deep/copy", b"old")
        store.copy("a", "deep/copy")
        store.put("a", b"two")
        store.delete("a")
        assert store.get("deep/copy").data == b"one"

    @pytest.mark.parametrize(
        "key",
        ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a/.hidden", "a#1", "a b", "ü", "a\\b", "a\n", "x" * 2000],
    )
    def test_hostile_keys_are_refused(self, store: ObjectStore, key: str) -> None:
        """Nothing is written or read outside the store, whatever a key looks like."""
        uses: list[Callable[[], object]] = [
            lambda: store.put(key, b""),
            lambda: store.put_if_absent(key, b""),
            lambda: store.put_if_match(key, b"", "etag"),
            lambda: store.get(key),
            lambda: store.head(key),
            lambda: store.read_range(key, 0, 1),
            lambda: store.delete(key),
            lambda: store.open_writer(key),
            lambda: store.copy(key, "a"),
            lambda: store.copy("a", key),
        ]
        for use in uses:
            with pytest.raises(InputError):
                use()


class TestRanges:
    """Parts of objects."""

    def test_a_range_is_short_only_at_the_end(self, store: ObjectStore) -> None:
        """As with files: short at the end, empty behind it, never an error."""
        store.put("a", b"0123456789")
        ranges = [(0, 10), (4, 3), (8, 100), (9, 1), (10, 1), (99, 5), (3, 0)]
        found = [bytes(store.read_range("a", start, length)) for start, length in ranges]
        assert found == [b"0123456789", b"456", b"89", b"9", b"", b"", b""]

    def test_what_was_let_go_is_still_there(self, store: ObjectStore) -> None:
        """It is a hint about memory: nothing is lost by it, and an object that is gone needs none."""
        store.put("a", b"0123456789")
        for position in (0, 4, 10, 99):
            store.let_go_below("a", position)
            assert bytes(store.read_range("a", 0, 10)) == b"0123456789"
        store.let_go_below("none", 1)

    def test_ranges_before_the_beginning_are_refused(self, store: ObjectStore) -> None:
        """A negative number is a mistake of the caller's."""
        store.put("a", b"0123456789")
        for start, length in ((-1, 2), (0, -1)):
            with pytest.raises(InputError):
                store.read_range("a", start, length)


class TestListing:
    """What is where."""

    def test_keys_are_listed_in_order(self, store: ObjectStore) -> None:
        """By key, at every depth, however they were written."""
        keys = ["a/0", "a/1", "a/b/c", "a0", "b/00000000000000000009", "b/00000000000000000010", "b/cur"]
        for key in reversed(keys):
            store.put(key, key.encode())
        assert keys_of(store) == keys
        assert [info.size for info in store.list()] == [len(key) for key in keys]

    def test_a_prefix_is_a_folder(self, store: ObjectStore) -> None:
        """A name that only begins alike is not in it; what is empty lists nothing."""
        for key in ("a/1", "a/2", "ab/1", "b"):
            store.put(key, b"")
        assert keys_of(store, "a/") == ["a/1", "a/2"]
        assert keys_of(store, "none/") == []
        with pytest.raises(InputError):
            keys_of(store, "a")

    def test_a_listing_can_start_behind_a_key(self, store: ObjectStore) -> None:
        """Whether that key is there or not."""
        for number in (1, 3, 5):
            store.put(f"a/{number}", b"")
        store.put("b", b"")
        assert keys_of(store, "a/", "a/3") == ["a/5"]
        assert keys_of(store, "a/", "a/2") == ["a/3", "a/5"]
        assert keys_of(store, "a/", "a/5") == []

    def test_a_long_listing_is_whole(self, store: ObjectStore) -> None:
        """Pages are put together without a seam."""
        keys = [f"many/{number:05d}" for number in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        assert keys_of(store, "many/") == keys
        assert keys_of(store, "many/", "many/01000") == keys[1001:]
        store.delete(keys)
        assert keys_of(store, "many/") == []


class TestConditions:
    """Writing only if."""

    def test_creating_what_is_there_is_a_conflict(self, store: ObjectStore) -> None:
        """The first content stays."""
        etag = store.put_if_absent("a/b", b"first")
        with pytest.raises(ConflictError):
            store.put_if_absent("a/b", b"second")
        assert store.get("a/b") == (b"first", etag)
        store.delete("a/b")
        store.put_if_absent("a/b", b"third")

    def test_replacing_needs_the_etag(self, store: ObjectStore) -> None:
        """An old etag is a conflict and changes nothing."""
        assert store.supports_conditional_update
        first = store.put("a", b"first")
        second = store.put_if_match("a", b"second", first)
        with pytest.raises(ConflictError):
            store.put_if_match("a", b"third", first)
        assert store.get("a") == (b"second", second)
        assert store.put_if_match("a", b"third", second) == store.head("a").etag

    def test_what_may_be_missing_is_found_or_not(self, store: ObjectStore) -> None:
        """Without an error on the way, and the same object as `get` and `head` have."""
        assert (store.find("a/b"), store.exists("a/b")) == (None, False)
        store.put("a/b", b"data")
        assert store.find("a/b") == store.get("a/b")
        assert store.exists("a/b")

    def test_what_is_not_there_cannot_be_replaced(self, store: ObjectStore) -> None:
        """It is not created by the way, with the etag of what was there before and with one from elsewhere."""
        etag = store.put("deep/a", b"first")
        store.delete("deep/a")
        for key in ("deep/a", "other/b", "deep/a/below"):
            with pytest.raises(ConflictError):
                store.put_if_match(key, b"second", etag)
        assert keys_of(store) == []

    @pytest.mark.deeper
    def test_of_many_creators_one_wins(self, store: ObjectStore) -> None:
        """And it is its content that is there."""
        for round_number in range(rounds_of(store)):
            key = f"race/{round_number}"
            won = winners(store, lambda number, key=key: store.put_if_absent(key, b"by %d" % number))  # type: ignore[misc]
            assert len(won) == 1
            assert store.get(key).data == b"by %d" % won[0]

    @pytest.mark.deeper
    def test_of_many_replacers_one_wins(self, store: ObjectStore) -> None:
        """And it is its content that is there."""
        etag = store.put("race", b"start")
        for _ in range(rounds_of(store)):

            def attempt(number: int, etag: str = etag) -> None:
                store.put_if_match("race", f"{etag} by {number}".encode(), etag)

            won = winners(store, attempt)
            assert len(won) == 1
            after = store.get("race")
            assert after.data == f"{etag} by {won[0]}".encode()
            etag = after.etag


class TestWriters:
    """Large objects, sent in parts."""

    @pytest.mark.parametrize("size", [0, 1, PART_BYTES, 2 * PART_BYTES + 12345])
    def test_what_was_written_is_published_at_the_end(self, store: ObjectStore, size: int) -> None:
        """Nobody sees the object before, and everybody sees all of it after."""
        data = os.urandom(size)
        with store.open_writer("deep/object") as writer:
            for at in range(0, size, 3_000_000):
                writer.write(memoryview(data)[at : at + 3_000_000])
            with pytest.raises(NotFoundError):
                store.head("deep/object")
            assert keys_of(store) == []
        assert writer.published == store.head("deep/object")
        assert writer.bytes_written == size == store.head("deep/object").size
        assert store.get("deep/object").data == data

    @pytest.mark.parametrize("size", [0, 1000, 2 * PART_BYTES + 1])
    def test_an_exception_leaves_nothing(self, store: ObjectStore, size: int) -> None:
        """What was there before is there still."""
        store.put("a", b"old")

        def fail(key: str) -> None:
            with store.open_writer(key) as writer:
                writer.write(bytes(size))
                raise KeyboardInterrupt

        for key in ("a", "b"):
            with pytest.raises(KeyboardInterrupt):
                fail(key)
        assert keys_of(store) == ["a"]
        assert list(store.unfinished_uploads()) == []
        assert store.get("a").data == b"old"

    @pytest.mark.parametrize("size", [1000, PART_BYTES // 2 + 1])
    def test_a_buffer_may_be_used_again(self, store: ObjectStore, size: int) -> None:
        """A shipper that reads a file through one buffer would otherwise send its last bytes again and again."""
        buffer = bytearray(size)
        with store.open_writer("a") as writer:
            for number in range(5):
                buffer[:] = bytes([number]) * size
                writer.write(memoryview(buffer).toreadonly())
            buffer[:] = b"x" * size
        assert store.get("a").data == b"".join(bytes([number]) * size for number in range(5))

    def test_a_closed_writer_takes_nothing(self, store: ObjectStore) -> None:
        """A published object is not changed."""
        with store.open_writer("a") as writer:
            writer.write(b"all")
        with pytest.raises(ClosedError):
            writer.write(b"more")
        assert store.get("a").data == b"all"


class TestBeingAnObject:
    """What a store shows of itself."""

    def test_a_store_pickles(self, store: ObjectStore) -> None:
        """It reaches the same place elsewhere; what lives in one process says that it cannot."""
        store.put("a", b"hello")
        if store.url == "memory://":
            with pytest.raises(InputError):
                pickle.dumps(store)
            return
        again = pickle.loads(pickle.dumps(store))
        assert again.get("a").data == b"hello"
        assert (again.url, repr(again)) == (store.url, repr(store))

    def test_no_secret_is_shown(self, s3_server: S3Server) -> None:
        """Not in the repr and not in an error."""
        store = s3_store(s3_server)
        with pytest.raises(NotFoundError) as missing:
            store.get("none")
        for text in (repr(store), str(missing.value), repr(vars(store))):
            assert "test-secret" not in text

    def test_a_forked_child_is_told(self, store: ObjectStore) -> None:
        """It gets an error where it would otherwise wait for ever."""
        store.put("a", b"hello")
        receiving, sending = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of exactly this
            child = os.fork()
        if child == 0:
            try:
                store.get("a")
                os.write(sending, b"no error")
            except InputError as error:
                os.write(sending, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(sending)
        with os.fdopen(receiving, "rb") as said:
            assert b"forked" in said.read()


class TestServerTrouble:
    """A real server that refuses, dies and comes back."""

    def test_a_server_that_died_is_a_reason_to_retry(self, s3_server: S3Server) -> None:
        """Every operation says so, and after the restart there is what was acknowledged and nothing of the rest."""
        store = s3_store(s3_server, store_max_retries=0)
        etag = store.put("kept", b"hello")
        writer = store.open_writer("half")
        writer.write(os.urandom(2 * PART_BYTES))
        uses: list[Callable[[], object]] = [
            lambda: store.get("kept"),
            lambda: store.head("kept"),
            lambda: store.read_range("kept", 0, 1),
            lambda: keys_of(store),
            lambda: store.put("new", b"x"),
            lambda: store.put_if_absent("new", b"x"),
            lambda: store.put_if_match("kept", b"x", etag),
            lambda: store.copy("kept", "new"),
            lambda: store.delete("kept"),
            lambda: finish(writer, os.urandom(2 * PART_BYTES)),
        ]
        s3_server.kill()
        try:
            for use in uses:
                with pytest.raises(StoreUnavailableError):
                    use()
        finally:
            s3_server.start()
        assert keys_of(store) == ["kept"]
        assert store.get("kept") == (b"hello", etag)

    def test_a_server_that_hangs_is_a_reason_to_retry(self, s3_server: S3Server) -> None:
        """The request timeout is kept."""
        patient = s3_store(s3_server)
        patient.put("a", b"hello")
        store = open_store(patient.url, s3_server.settings(store_max_retries=0, store_request_timeout_ms=300), {})
        s3_server.pause()
        try:
            with pytest.raises(StoreUnavailableError):
                store.get("a")
            with pytest.raises(StoreUnavailableError):
                store.put_if_absent("b", b"undecided")
        finally:
            s3_server.resume()
        assert patient.get("a").data == b"hello"


def finish(writer: ObjectWriter, data: bytes) -> None:
    """Ends a writer that was begun elsewhere."""
    with writer:
        writer.write(data)

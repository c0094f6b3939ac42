"""Bad input: named before anything is done, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import open_local

import tidelog
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CreateBucket, Entry, PutObject
from tidelog.errors import ClosedError, ConfigError, DiskFullError, InputError, LogFailedError, NotFoundError
from tidelog.testing import FaultyFiles


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """One with a small and a large object."""
    with open_local(tmp_path / "e") as opened:
        opened.apply_many(
            [(1, CreateBucket("b")), (2, PutObject("b", "small", b"v")), (3, PutObject("b", "large", b"v" * 900))]
        )
        yield opened


@pytest.mark.parametrize("entries", [5, None, [1], [(4, CreateBucket("c"), 0)], [()], ["ab"], [(4, None)]])
def test_what_are_no_entries_is_named(engine: Engine, entries: Any) -> None:
    """Not pairs, not entries, nothing to go through."""
    with pytest.raises(InputError):
        engine.apply_many(entries)
    assert engine.applied_seq == 3


@pytest.mark.parametrize(
    ("seq", "entry", "text"),
    [
        (0, CreateBucket("c"), r"seq must be a whole number from 1 to 2\*\*64 - 1, not 0"),
        (4, "c", "str is no entry"),
    ],
)
def test_the_error_begins_with_what_is_wrong(engine: Engine, seq: int, entry: Any, text: str) -> None:
    """And not with a rule about pairs, for whoever gave one entry."""
    with pytest.raises(InputError, match=rf"^(apply: )?{text}"):
        engine.apply(seq, entry)


def test_an_iterable_that_raises_leaves_nothing(engine: Engine) -> None:
    """Its own error comes through, and none of its entries was applied."""

    def entries() -> Iterator[tuple[int, Entry]]:
        yield 4, CreateBucket("c")
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        engine.apply_many(entries())
    assert engine.apply_many([]) == []
    assert engine.list_buckets() == ["b"]


@pytest.mark.parametrize("name", [1, None, b"small", ["small"], 1.5, "\ud800"])
def test_what_is_no_name_is_named(engine: Engine, name: Any) -> None:
    """Names are text; half of a surrogate pair is none."""
    calls: list[Callable[[], object]] = [
        lambda: engine.read("b", name),
        lambda: engine.read("b", name, 2),
        lambda: engine.list_objects(name),
        lambda: engine.list_objects("b", name),
        lambda: engine.versions("b", name),
        lambda: engine.versions(name, "small"),
    ]
    for call in calls:
        with pytest.raises(InputError):
            call()
    with pytest.raises((InputError, NotFoundError)):
        engine.read(name, "small")


@pytest.mark.parametrize("name", ["", "a\0b", "k" * 1025, "é" * 3000])
def test_a_name_that_no_object_can_have_is_not_found(engine: Engine, name: str) -> None:
    """It may be asked for."""
    with pytest.raises(NotFoundError):
        engine.read("b", name)
    with pytest.raises(NotFoundError):
        engine.read(name, "small")
    with pytest.raises(NotFoundError):
        engine.versions("b", name)


def test_names_are_not_normalised(engine: Engine) -> None:
    """What looks the same in two spellings is two objects."""
    engine.apply_many([(4, PutObject("b", "e\u0301", b"two")), (5, PutObject("b", "\u00e9", b"one"))])
    assert engine.read("b", "e\u0301").data == b"two"
    assert engine.read("b", "\u00e9").data == b"one"


def test_the_largest_seq_is_a_seq_like_others(tmp_path: Path) -> None:
    """It can be applied, read, repeated, rolled back and marked, and is the last one."""
    last = (1 << 64) - 1
    with open_local(tmp_path / "e") as engine:
        engine.apply_many(
            [(1, CreateBucket("b")), (last - 1, PutObject("b", "k", b"a")), (last, PutObject("b", "k", b"z"))]
        )
        assert (engine.read("b", "k").data, engine.read("b", "k", last - 1).data) == (b"z", b"a")
        engine.rollback_to(last - 1)
        assert engine.read("b", "k").data == b"a"
        assert engine.apply(last, PutObject("b", "k", b"y")).applied
        engine.update_low_water_mark(last)
    with open_local(tmp_path / "e") as engine:
        assert (engine.applied_seq, engine.low_water_mark) == (last, last)
        assert engine.apply(last, PutObject("b", "k", b"y")).applied


def test_a_closed_engine_reads_nothing(tmp_path: Path) -> None:
    """Not from memory either: every call says that it is closed."""
    with open_local(tmp_path / "e") as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "small", b"v"))])
    calls: list[Callable[[], object]] = [
        lambda: engine.read("b", "small"),
        lambda: engine.read("b", "small", 2),
        lambda: engine.list_objects("b"),
        engine.list_buckets,
        lambda: engine.versions("b", "small"),
        engine.digest,
        lambda: engine.rollback_to(1),
        lambda: engine.update_low_water_mark(1),
        engine.create_checkpoint,
        engine.transaction,
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_a_directory_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    """A file, or something below a file."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot be used"):
            tidelog.open_engine(path)


@pytest.mark.parametrize("operation", ["write_at", "sync", "rename"])
def test_a_checkpoint_that_cannot_be_written_down_says_so(operation: Any) -> None:
    """The one before stays the last, entries go on, and the next one succeeds."""
    files = FaultyFiles()
    with open_local(Path("/data/engine"), files) as engine:
        engine.apply(1, CreateBucket("b"))
        files.fail(operation, matching="engine.ckpt*")
        with pytest.raises((LogFailedError, DiskFullError), match="checkpoint"):
            engine.create_checkpoint()
        assert engine.apply(2, PutObject("b", "k", b"v")).applied
        assert engine.create_checkpoint() == 2


def test_topics_and_engines_do_not_share_a_directory(tmp_path: Path) -> None:
    """Whoever mixes them up is told, and nothing is written."""
    tidelog.open(tmp_path / "topics").close()
    tidelog.open_engine(tmp_path / "engine").close()
    with pytest.raises(ConfigError, match="holds topics"):
        tidelog.open_engine(tmp_path / "topics")
    with pytest.raises(ConfigError, match="holds an engine"):
        tidelog.open(tmp_path / "engine")
    assert not (tmp_path / "topics" / "engine.json").exists()
    assert not (tmp_path / "engine" / "tidelog.json").exists()


@pytest.mark.parametrize("what", ["prefix", "start", "end"])
@pytest.mark.parametrize("wrong", [5, b"b", "\ud800"])
def test_bound_of_a_scan_that_is_no_text_is_named(engine: Engine, what: str, wrong: Any) -> None:
    """By its own name: it is not the name of a key."""
    with pytest.raises(InputError, match=rf"^{what} "):
        engine.scan("b", **{what: wrong})


def test_arguments_of_listings_and_changes_that_are_no_text_are_named(engine: Engine) -> None:
    """Each by its own name."""
    wrong: Any = 5
    for what in ("prefix", "start_after", "delimiter"):
        with pytest.raises(InputError, match=rf"^{what} must be str, not int"):
            engine.list_objects("b", **{what: wrong})
    with pytest.raises(InputError, match=r"^prefix must be str, not int"):
        engine.changes(prefix=wrong)
    with pytest.raises(InputError, match=r"^prefix must be str, not int"):
        engine.prefetch("b", wrong)


def test_checksum_of_what_is_no_data_is_refused() -> None:
    """Bytes of any kind have one; text and numbers have none."""
    assert tidelog.object_crc(b"abc") == tidelog.object_crc(bytearray(b"abc")) == tidelog.object_crc(memoryview(b"abc"))
    for wrong in ("x", 5, None):
        with pytest.raises(InputError, match="data must be bytes"):
            tidelog.object_crc(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="metadata"):
        tidelog.object_crc(b"", [])  # type: ignore[arg-type]


def test_options_of_a_shared_store_need_one(tmp_path: Path) -> None:
    """They were taken without a store, and never did anything; nothing is made where they are refused."""
    with pytest.raises(ConfigError, match="shares_store is for replicas of one store"):
        tidelog.open_engine(tmp_path / "e", shares_store=True)
    with pytest.raises(InputError, match="on_take_over is for a replica that shares its store"):
        tidelog.open_engine(
            tmp_path / "e",
            store=f"file://{tmp_path}/store",
            take_over_after_seconds=5,
            on_take_over=lambda owner: owner.close(),
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", [["http://127.0.0.1:1"], 5, None])
def test_address_of_a_server_that_is_no_text_is_refused(url: Any) -> None:
    """A list of addresses is none: one is enough."""
    with pytest.raises(InputError, match="the address of a server must be str"):
        tidelog.connect(url)

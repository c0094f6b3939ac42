"""Scans, reads of many objects and listings with a delimiter, held against a plain dict."""

from __future__ import annotations

import asyncio
import os
import tempfile
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.engine.engines import copy_alive, open_local
from tests.engine.model import Model, State

import tidelog
from tidelog.engine.engine import Engine
from tidelog.engine.entry import (
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
)
from tidelog.engine.settings import EngineSettings
from tidelog.errors import ConflictError, DataError, InputError, NotFoundError

NAMES = st.sampled_from(["a", "b"])
KEYS = st.sampled_from(["", "a", "a/", "a/b", "a/b/c", "a/é", "b", "b\U0001f600", "ba", "z" * 300, "z" * 299])
REAL_KEYS = KEYS.filter(bool)
BOUNDS = st.none() | KEYS | st.sampled_from(["a\0", "a\0b", "x" * 3000, "\U0010ffff", "~"])
VALUES = st.sampled_from([b"", b"small", b"large" * 100])
METADATA = st.sampled_from([{}, {}, {"by": "ann"}])
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(CreateBucket, NAMES),
    st.builds(DeleteBucket, NAMES, st.booleans()),
    *[st.builds(PutObject, NAMES, REAL_KEYS, VALUES, METADATA)] * 4,
    st.builds(DeleteObject, NAMES, REAL_KEYS),
    st.builds(CopyObject, NAMES, REAL_KEYS, NAMES, REAL_KEYS),
)
ENTRIES: st.SearchStrategy[Entry] = OPERATIONS | st.lists(OPERATIONS, min_size=1, max_size=6).map(Batch)


def expected(
    state: State, bucket: str, start: str | None, end: str | None, prefix: str, reverse: bool, limit: int | None
) -> list[tuple[str, int, int, bytes, dict[str, object]]]:
    """What a scan gives, by the model."""
    found = [
        (key, len(one.data), one.seq, one.data, one.metadata)
        for key, one in sorted(state[bucket].objects.items(), key=lambda item: item[0].encode(), reverse=reverse)
        if key.startswith(prefix)
        and (start is None or key.encode() >= start.encode())
        and (end is None or key.encode() < end.encode())
    ]
    return found[:limit]


class Look(NamedTuple):
    """What is read of one state. It is drawn before there is an engine: what fails then shows its own error."""

    seq: int
    bucket: str
    start: str | None
    end: str | None
    prefix: str
    reverse: bool
    limit: int | None
    listed: str
    delimiter: str
    keys: list[tuple[str, str]]


LOOKS = st.builds(
    Look,
    st.integers(0, 25),
    NAMES,
    BOUNDS,
    BOUNDS,
    st.sampled_from(["", "a", "a/", "b", "a\0"]),
    st.booleans(),
    st.none() | st.integers(1, 4),
    st.sampled_from(["", "a", "a/", "b"]),
    st.sampled_from(["/", "a", "zz"]),
    st.lists(st.tuples(NAMES, KEYS), max_size=5),
)


@settings(max_examples=examples(60))
@given(st.lists(ENTRIES, max_size=25), st.lists(LOOKS, min_size=8, max_size=8))
def test_a_scan_is_that_of_a_dict(entries: list[Entry], looks: list[Look]) -> None:
    """Both directions, any bounds and prefixes, at any seq, with deletions and buckets that were created again; also
    after the process was killed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        first, second = Path(scratch, "first"), Path(scratch, "second")
        model, engine = Model(), open_local(first)
        for seq, entry in enumerate([CreateBucket("a"), *entries], 1):
            engine.apply(seq, entry)
            model.apply(seq, entry)
        copy_alive(first, second)
        engine.close(checkpoint=False)
        with open_local(second) as engine:
            assert engine.applied_seq == model.applied_seq
            for look in looks:
                _compare(engine, model, look._replace(seq=look.seq % (engine.applied_seq + 1)))


def _compare(engine: Engine, model: Model, look: Look) -> None:
    seq, bucket, start, end, prefix, reverse, limit, *_ = look
    state = model.at(seq)
    if bucket not in state:
        with pytest.raises(NotFoundError):
            engine.scan(bucket, seq=seq)
        return
    wanted = expected(state, bucket, start, end, prefix, reverse, limit)
    options = {"prefix": prefix, "reverse": reverse, "limit": limit, "seq": seq}
    found = list(engine.scan(bucket, start, end, with_values=True, **options))  # type: ignore[arg-type]
    assert [(one.key, one.size, one.seq, one.data, one.metadata) for one in found] == wanted
    plain = list(engine.scan(bucket, start, end, **options))  # type: ignore[arg-type]
    assert [(one.key, one.size, one.seq) for one in plain] == [row[:3] for row in wanted]
    assert [one.crc for one in plain] == [tidelog.object_crc(one.data or b"", one.metadata) for one in found]
    _compare_listing(engine, state, look)
    read = [None if one is None else (one.data, one.metadata, one.seq) for one in engine.read_many(look.keys, seq)]
    there = [state[name].objects.get(key) if name in state else None for name, key in look.keys]
    assert read == [None if one is None else (one.data, one.metadata, one.seq) for one in there]


def _compare_listing(engine: Engine, state: State, look: Look) -> None:
    seq, bucket, prefix, delimiter = look.seq, look.bucket, look.listed, look.delimiter
    wanted: dict[str, tuple[int, int, bool]] = {}
    for key, one in sorted(state[bucket].objects.items(), key=lambda item: item[0].encode()):
        if key.startswith(prefix):
            head, found, _ = key[len(prefix) :].partition(delimiter)
            name = prefix + head + found
            wanted.setdefault(name, (0, 0, True) if found else (len(one.data), one.seq, False))
    listed = list(engine.list_objects(bucket, prefix, seq, delimiter=delimiter))
    assert {item.key: (item.size, item.seq, item.is_prefix) for item in listed} == wanted
    assert [item.key for item in listed] == list(wanted)
    pages: list[str] = []
    while page := list(
        engine.list_objects(bucket, prefix, seq, delimiter=delimiter, limit=2, start_after=pages[-1] if pages else None)
    ):
        pages += [item.key for item in page]
    assert pages == list(wanted), "page by page, each common prefix once"


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_many_pages_has_every_version_of_its_seq(tmp_path: Path, reverse: bool) -> None:
    """More objects than a step, more versions than a page, with a pool that holds a few pages."""
    small = EngineSettings(buffer_pool_bytes=64 * 8192, checks_invariants=True)
    keys = [f"{number:05}" for number in range(900)]
    with open_local(tmp_path, settings=small) as engine:
        engine.apply(1, CreateBucket("b"))
        for seq in range(2, 12):
            engine.apply(seq, Batch([PutObject("b", key, b"%d" % seq * (seq * 20)) for key in keys[:: seq - 1]]))
        engine.apply(12, Batch([PutObject("b", "00450", b"v"), DeleteObject("b", "00451")]))
        engine.apply_many([(seq, PutObject("b", "00450", b"v" * 200)) for seq in range(13, 400)])
        for seq in (2, 7, 12, 300, 399):
            wanted = [(item.key, item.size, item.seq) for item in engine.list_objects("b", seq=seq)]
            found = [(one.key, one.size, one.seq) for one in engine.scan("b", seq=seq, reverse=reverse)]
            assert found == (wanted[::-1] if reverse else wanted)
            some = [one.key for one in engine.scan("b", "00100", "00200", seq=seq, reverse=reverse, limit=20)]
            inside = [key for key, *_ in wanted if "00100" <= key < "00200"]
            assert some == (inside[::-1] if reverse else inside)[:20]


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_mixes_values_of_pages_with_others(tmp_path: Path, reverse: bool) -> None:
    """Stretches of small values, of large ones and of some with metadata follow each other; a limit ends anywhere."""
    values = [b"small-%d" % number if number % 1200 < 700 else b"large-%d " % number * 50 for number in range(2000)]
    metadata = [{"by": "ann"} if number in (100, 1300) else {} for number in range(2000)]
    puts = [PutObject("a", f"{number:04d}", values[number], metadata[number]) for number in range(2000)]
    with open_local(tmp_path / "e") as engine:
        engine.apply_many([(1, CreateBucket("a")), (2, Batch(puts[:1000])), (3, Batch(puts[1000:]))])
        wanted = [(put.key, put.data, put.metadata) for put in (reversed(puts) if reverse else puts)]
        for limit in (None, 1, 255, 256, 257, 700, 1201, 1999, 2000, 2001):
            found = engine.scan("a", with_values=True, reverse=reverse, limit=limit)
            assert [(one.key, one.data, one.metadata) for one in found] == wanted[:limit]


def test_metadata_of_scanned_objects_is_not_shared(tmp_path: Path) -> None:
    """Who changes the metadata of one object changes that of no other."""
    with open_local(tmp_path / "e") as engine:
        engine.apply_many([(1, CreateBucket("a")), (2, PutObject("a", "k", b"1")), (3, PutObject("a", "l", b"2"))])
        first, second = engine.scan("a", with_values=True)
        assert first.metadata is not None
        first.metadata["by"] = "ann"
        assert second.metadata == {}


def test_scan_refuses_a_damaged_value_of_a_page(tmp_path: Path) -> None:
    """The value of a page is returned with the checksum of its object, or not at all."""
    with open_local(tmp_path / "e") as engine:
        engine.apply_many([(1, CreateBucket("a")), (2, PutObject("a", "k", b"small value"))])
        pages = engine._core.pool.pages
        for page in pages.values():
            at = page.find(b"small value")
            if at >= 0:
                page[at] ^= 1
        with pytest.raises(DataError, match="checksum"):
            list(engine.scan("a", with_values=True))


@pytest.mark.parametrize("with_values", [False, True])
def test_a_scan_sees_one_state_while_others_write(tmp_path: Path, with_values: bool) -> None:
    """What is applied after it has begun is not in it; a rollback of its state ends it."""
    with open_local(tmp_path) as engine:
        puts = [PutObject("b", f"{number:04}", b"old" * 100) for number in range(600)]
        engine.apply_many([(1, CreateBucket("b")), (2, Batch(puts))])
        scan = engine.scan("b", with_values=with_values)
        assert next(scan).key == "0000"
        engine.apply(3, Batch([PutObject("b", f"{number:04}", b"new") for number in range(0, 1200, 2)]))
        engine.apply(4, DeleteBucket("b", force=True))
        rest = list(scan)
        assert (len(rest), {one.seq for one in rest}) == (599, {2})
        engine.rollback_to(3)
        scan = engine.scan("b", with_values=with_values)
        next(scan)
        engine.rollback_to(2)
        with pytest.raises(ConflictError):
            list(scan)


def test_scans_and_reads_of_many_in_tasks(tmp_path: Path) -> None:
    """The async twins give the same."""

    async def look() -> None:
        keys = [one.key async for one in engine.scan_async("b", reverse=True)]
        assert keys == ["y", "x"]
        found = await engine.read_many_async([("b", "x"), ("b", "none"), ("none", "x")])
        assert [one and (one.data, one.tier) for one in found] == [(b"1", "hot"), None, None]

    with open_local(tmp_path) as engine:
        engine.apply(1, Batch([CreateBucket("b"), PutObject("b", "x", b"1"), PutObject("b", "y", b"2")]))
        asyncio.run(look())


def pins_of(engine: Engine) -> int:
    """How many states are held."""
    garbage = engine.statistics().garbage
    assert garbage is not None
    return garbage.pins


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("data", [b"1", bytes(3000)], ids=["in the rows", "in the log"])
def test_seek_moves_a_scan_to_a_key_within_its_state_and_bounds(tmp_path: Path, data: bytes, with_values: bool) -> None:
    """In both directions, also back, after the end, and while somebody iterates; entries that follow do not show."""
    with open_local(tmp_path) as engine:
        names = [f"k{number:03d}" for number in range(300)]
        engine.apply(1, Batch([CreateBucket("b"), *(PutObject("b", name, data) for name in names)]))
        for is_reverse in (False, True):
            scan = engine.scan("b", "k010", "k200", reverse=is_reverse, with_values=with_values)
            engine.apply(engine.applied_seq + 1, PutObject("b", "k050x", data))
            shown = names[10:200][::-1] if is_reverse else names[10:200]
            assert next(scan).key == shown[0]
            scan.seek("k050x")
            assert [one.key for one in islice(scan, 3)] == shown[shown.index("k050" if is_reverse else "k051") :][:3]
            scan.seek("k030")
            assert next(scan).key == "k030"
            scan.seek("a")
            assert [one.key for one in scan] == ([] if is_reverse else shown)
            scan.seek("z")
            assert [one.key for one in scan] == (shown if is_reverse else [])
            scan.seek("k100")
            assert next(scan).key == "k100"
            seen = list[str]()
            for one in scan:
                seen.append(one.key)
                if len(seen) == 2:
                    scan.seek("k150")
            assert seen[2:] == shown[shown.index("k150") :]
            scan.close()
            assert next(scan, None) is None
            engine.apply(engine.applied_seq + 1, DeleteObject("b", "k050x"))
        limited = engine.scan("b", limit=2, with_values=with_values)
        assert len(list(limited)) == 2
        limited.seek("k007")
        assert [one.key for one in limited] == ["k007", "k008"]
        assert pins_of(engine) == 0


def test_seek_of_a_scan_whose_state_was_rolled_back_or_is_forgotten_raises(tmp_path: Path) -> None:
    """A scan that has ended holds nothing back, and never goes on in another state."""
    with open_local(tmp_path) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "x", b"1")), (3, PutObject("b", "y", b"1"))])
        scan = engine.scan("b")
        assert len(list(scan)) == 2
        engine.rollback_to(2)
        engine.apply(3, PutObject("b", "z", b"2"))
        with pytest.raises(ConflictError):
            scan.seek("x")
        scan = engine.scan("b", seq=2)
        assert len(list(scan)) == 1
        engine.update_low_water_mark(3)
        engine.collect_garbage(horizon=3)
        with pytest.raises(NotFoundError):
            scan.seek("x")


def test_seek_of_a_scan_in_tasks(tmp_path: Path) -> None:
    """The same, with the next object; ending it lets go of its state."""

    async def look() -> None:
        scan = engine.scan_async("b", with_values=True)
        scan.seek("k2500")
        assert (await anext(scan)).key == "k2500"
        scan.seek("k0100")
        assert [one.key async for one in scan] == names[100:]
        scan.seek("k2999")
        assert [one.key async for one in scan] == names[2999:]
        scan.seek("k0000")
        assert (await anext(scan)).key == "k0000"
        await scan.aclose()
        assert pins_of(engine) == 0

    with open_local(tmp_path) as engine:
        names = [f"k{number:04d}" for number in range(3000)]
        engine.apply(1, Batch([CreateBucket("b"), *(PutObject("b", name, b"1") for name in names)]))
        asyncio.run(look())


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    """Before anything is read."""
    with open_local(tmp_path) as engine:
        engine.apply(1, CreateBucket("b"))
        for wrong in (
            lambda: engine.scan("b", limit=0),
            lambda: engine.scan("b").seek(7),  # type: ignore[arg-type]
            lambda: engine.scan("b", start=7),  # type: ignore[arg-type]
            lambda: engine.scan("b", end=b"x"),  # type: ignore[arg-type]
            lambda: engine.scan("b", seq=2),
            lambda: engine.scan(b"b"),  # type: ignore[arg-type]
            lambda: engine.list_objects("b", delimiter=7),  # type: ignore[arg-type]
            lambda: engine.read_many("b"),  # type: ignore[arg-type]
            lambda: engine.read_many([("b",)]),  # type: ignore[list-item]
            lambda: engine.read_many([("b", 1)]),  # type: ignore[list-item]
            lambda: engine.read_many(7),  # type: ignore[arg-type]
        ):
            with pytest.raises(InputError):
                wrong()


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_reads_values_that_lie_apart_with_few_calls(
    *, reverse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them took a call from Python of its own; a batch takes one for many, in whatever order they were put."""
    with open_local(tmp_path / "e", settings=EngineSettings()) as engine:
        wanted = {f"k{number:04}": b"%04d" % number * 1000 for number in range(400)}
        apart = [PutObject("c", f"{number}", b"x" * 20_000) for number in range(400)]
        puts = [one for pair in zip(sorted(wanted, key=hash), apart, strict=True) for one in pair]
        entries = [one if isinstance(one, PutObject) else PutObject("b", one, wanted[one]) for one in puts]
        engine.apply_many(enumerate([CreateBucket("b"), CreateBucket("c"), *entries], 1))
        assert engine.read("b", "k0000").data == wanted["k0000"]  # where the files are is known from here on
        read: list[int] = []
        pread = os.pread

        def counted(descriptor: int, size: int, position: int) -> bytes:
            read.append(size)
            return pread(descriptor, size, position)

        monkeypatch.setattr(os, "pread", counted)
        found = {one.key: one.data for one in engine.scan("b", with_values=True, reverse=reverse)}
        assert found == wanted
        assert list(found) == sorted(wanted, reverse=reverse)
        assert len(read) < 50

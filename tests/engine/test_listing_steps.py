"""What listings and the first steps of transactions cost, counted in pages that are looked at."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import RandomEntries, open_local
from tests.oracles import versions as versions_oracle
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.btree.page import ROOT, new_page
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CreateBucket, DeleteObject, PutObject
from tidelog.engine.mvcc.cells import MAX_SEQ, objects_of
from tidelog.engine.settings import EngineSettings
from tidelog.errors import DataError

engine_kernel: Any = _native


def _looked_at(engine: Engine, work: Callable[[], object]) -> int:
    """How many pages of the index some work looks at."""
    before = engine.statistics().buffer_pool.hits
    work()
    return engine.statistics().buffer_pool.hits - before


def _with_versions(directory: Path, keys: int, versions: int) -> Engine:
    engine = open_local(directory, settings=EngineSettings())
    puts = [PutObject("b", f"k{number % keys}", b"") for number in range(keys * versions)]
    engine.apply_many([(1, CreateBucket("b")), *enumerate(puts, 2)])
    return engine


def _with_deleted(directory: Path, keys: int) -> Engine:
    engine = open_local(directory, settings=EngineSettings())
    puts = [PutObject("b", f"k{number}", b"") for number in range(keys)]
    deletes = [DeleteObject("b", f"k{number}") for number in range(keys)]
    engine.apply_many([(1, CreateBucket("b")), (2, Batch(puts)), (3, Batch(deletes))])
    return engine


@pytest.mark.parametrize("seq", [None, 4000, 9])
def test_listing_of_many_versions_seeks_from_key_to_key(tmp_path: Path, seq: int | None) -> None:
    """Four objects with two thousand versions each are listed by looking at some pages, not at all of them."""
    with _with_versions(tmp_path / "e", 4, 2000) as engine:
        assert engine.statistics().index_bytes > 50 * 8192
        assert _looked_at(engine, lambda: list(engine.list_objects("b", seq=seq))) < 40


@pytest.mark.parametrize("step", ["put", "read", "copy", "delete"])
def test_first_step_of_a_transaction_looks_at_no_deleted_object(tmp_path: Path, step: str) -> None:
    """Three thousand objects that were deleted cost the first step of a transaction nothing."""
    with _with_deleted(tmp_path / "e", 3000) as engine, engine.transaction() as tx:
        engine.apply(4, PutObject("b", "k", b""))
        steps: dict[str, Callable[[], object]] = {
            "put": lambda: tx.put("b", "new", b""),
            "read": lambda: tx.read("b", "k"),
            "copy": lambda: tx.copy("b", "k", "b", "other"),
            "delete": lambda: tx.delete("b", "k1"),
        }
        assert _looked_at(engine, steps[step]) < 10


def test_guard_of_an_object_looks_at_no_other_object(tmp_path: Path) -> None:
    """Whether an object is unchanged is asked of that object, whatever else begins like it."""
    with _with_deleted(tmp_path / "e", 3000) as engine:
        assert _looked_at(engine, lambda: engine.find_object("b", "k")) < 10
        assert engine.find_object("b", "k") is None
        assert engine.find_object("nowhere", "k") is None
        assert [engine.has_bucket("b"), engine.has_bucket("b", 0), engine.has_bucket("nowhere")] == [True, False, False]


def test_listing_of_a_bucket_of_deleted_objects_is_done_in_bounded_steps(tmp_path: Path) -> None:
    """No step of a listing looks at more cells than its bound, however few objects it finds."""
    with _with_deleted(tmp_path / "e", 3000) as engine:
        start, stop = objects_of("b")
        rows, resume, missing = engine_kernel.list_seen(
            *(engine._core.pool.pages, ROOT, start, stop, MAX_SEQ, 1, 0, 256, 0, False, 0, b"")
        )
        assert (rows, missing) == ([], 0)
        assert start < resume < stop
        assert list(engine.list_objects("b")) == []


def test_objects_are_listed_as_the_twin_lists_them(tmp_path: Path) -> None:
    """At any seq, from any key, in pieces of any size, with pages that are missing."""
    entries = RandomEntries("list", keys=400)
    chance = random.Random(11)
    seen: set[int] = set()
    with open_local(tmp_path / "e") as engine:
        engine.apply_many(entries.entries(1500))
        pages = engine._core.pool.pages
        some = {page: pages[page] for page in list(pages)[::2]} | {ROOT: pages[ROOT]}
        for number in range(400):
            start, stop = objects_of(f"bucket-{chance.randrange(4)}", chance.choice(("", "key", "key/1", "z")))
            seq = chance.choice((0, 1, MAX_SEQ, chance.randrange(2000)))
            wanted = seq, chance.randrange(200), chance.randrange(3), chance.choice((1, 7, 256, 2048))
            columns, reverse = chance.randrange(4), chance.random() < 0.5
            folds = chance.choice(((0, b""), (0, b"/"), (3, b"1"), (4, b"ng"), (900, b"/")))
            resume: bytes | None = stop if reverse else start
            while resume is not None:
                bounds = (start, resume) if reverse else (resume, stop)
                arguments = (some if number % 3 == 0 else pages), ROOT, *bounds, *wanted, columns, reverse, *folds
                rows, resume, missing = agreed(engine_kernel, versions_oracle, "list_seen", *arguments)[1]
                assert {len(row) for row in rows} in ([set(), {3}], [set(), {4}], [set(), {9}], [set(), {6}, {9}])[
                    columns
                ]
                seen.update(map(len, rows))
                if missing:
                    break
    assert seen == {3, 4, 6, 9}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"ob\0k\0" + bytes(8), b"\0" * 16),
        (b"ob\0k\0" + bytes(8), b"\4" * 17),
        (b"ob\0k\0" + bytes(8), b"\0" * 37),
        (b"ob\0" + bytes(8), b"\1" + bytes(16)),
        (b"ob\0kk" + bytes(8), b"\1" + bytes(16)),
        (b"ob\0k\0k\0" + bytes(8), b"\1" + bytes(16)),
        (b"ob\0k", b"\1" + bytes(16)),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_listing_refuses_what_is_no_version(key: bytes, value: bytes, reverse: bool) -> None:
    """A page with a cell that cannot be a version of an object is damaged, and kernel and twin say so alike."""
    page = new_page(ROOT, 0)
    _native.insert(page, key, value, 1)
    found = agreed(
        engine_kernel,
        versions_oracle,
        "list_seen",
        {ROOT: page},
        ROOT,
        b"ob\0",
        b"ob\1",
        MAX_SEQ,
        0,
        0,
        9,
        0,
        reverse,
        0,
        b"",
    )
    assert found[:2] == ("raised", DataError)


@pytest.mark.parametrize("limit", [-1, 0, 2049])
def test_listing_has_a_bound_on_its_limit(limit: int) -> None:
    """A step that could take for ever is refused."""
    arguments = {ROOT: new_page(ROOT, 0)}, ROOT, b"ob\0", b"ob\1", MAX_SEQ, 0, 0, limit, 0, False, 0, b""
    assert agreed(engine_kernel, versions_oracle, "list_seen", *arguments)[:2] == ("raised", ValueError)

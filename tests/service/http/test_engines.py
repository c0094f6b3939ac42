"""Engines over HTTP: apply, read as of a seq, scan, history, marks."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.service.http.serving import Served, serving
from tests.service.http.test_admin import ended

import tidelog

MAIN = "/v1/engines/main"
PHOTOS = f"{MAIN}/buckets/photos/objects"
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Served]:
    """A server with an engine that has one bucket."""
    with serving(tmp_path / "data", engine=tmp_path / "engine") as served:
        made = {"seq": 1, "entry": {"type": "CreateBucket", "bucket": "photos"}}
        served.ok("POST", f"{MAIN}/apply", {"entries": [made]})
        yield served


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_entries_are_applied_once(engine: Served, tmp_path: Path) -> None:
    """The same seq with the same entry is a no-op, with another entry an error; what was answered is on the disk."""
    put = {"type": "PutObject", "bucket": "photos", "key": "cat", "data": text(b"meow"), "metadata": {"legs": 4}}
    entries = {"entries": [{"seq": 2, "entry": put}, {"seq": 3, "entry": {**put, "key": "dog"}}]}
    applied = engine.ok("POST", f"{MAIN}/apply", entries)
    assert [one["status"] for one in applied["results"]] == ["applied", "applied"]
    assert applied["applied_seq"] == 3
    assert engine.ok("POST", f"{MAIN}/apply", entries) == applied
    other = {"entries": [{"seq": 3, "entry": {**put, "key": "cow"}}]}
    assert engine.call("POST", f"{MAIN}/apply", other).status in (400, 409)


def test_objects_are_read_as_of_any_seq(engine: Served) -> None:
    """Bytes as they were put, with seq, tier and metadata in headers; what was not there is 404."""
    key = quote("a/b c", safe="")
    engine.ok("PUT", f"{PHOTOS}/{key}?seq=2&metadata={quote(json.dumps({'n': 1}))}", b"\x00one", OCTETS)
    engine.ok("PUT", f"{PHOTOS}/{key}?seq=3", b"two", OCTETS)
    engine.ok("DELETE", f"{PHOTOS}/{key}?seq=4")
    first = engine.call("GET", f"{PHOTOS}/{key}?seq=2")
    assert (first.status, first.body, first.headers["x-tidelog-seq"]) == (200, b"\x00one", "2")
    assert json.loads(first.headers["x-tidelog-metadata"]) == {"n": 1}
    assert engine.call("GET", f"{PHOTOS}/{key}?seq=3").body == b"two"
    gone = engine.call("GET", f"{PHOTOS}/{key}")
    assert (gone.status, gone.json["error"]) == (404, "NotFoundError")
    versions = engine.ok("GET", f"{PHOTOS}/{key}/versions")["versions"]
    assert [(one["seq"], one["is_deleted"]) for one in versions] == [(4, True), (3, False), (2, False)]


def test_conditions_refuse_in_the_state(engine: Served) -> None:
    """A put that must be the first is refused by the engine when there is an object: the seq is used."""
    engine.ok("PUT", f"{PHOTOS}/cat?seq=2", b"1", OCTETS)
    refused = engine.ok("PUT", f"{PHOTOS}/cat?seq=3&if_absent=true", b"2", OCTETS)
    assert refused["status"] == "refused"
    assert engine.call("GET", f"{PHOTOS}/cat").body == b"1"


def test_ranges_are_scanned(engine: Served) -> None:
    """By prefix, bounds and direction, with values, and grouped by a delimiter."""
    for number, key in enumerate(("a/1", "a/2", "b", "c/1")):
        engine.ok("PUT", f"{PHOTOS}/{quote(key, safe='')}?seq={number + 2}", key.encode(), OCTETS)
    everything = engine.ok("GET", PHOTOS)
    assert ([one["key"] for one in everything["objects"]], everything["is_cut"]) == (["a/1", "a/2", "b", "c/1"], False)
    part = engine.ok("GET", f"{PHOTOS}?start=a/2&end=c&with_values=true&reverse=true&limit=1")
    assert ([one["data"] for one in part["objects"]], part["is_cut"]) == ([text(b"b")], True)
    grouped = engine.ok("GET", f"{PHOTOS}?delimiter=/")
    assert [(one["key"], "is_prefix" in one) for one in grouped["objects"]] == [
        ("a/", True),
        ("b", False),
        ("c/", True),
    ]
    assert [one["key"] for one in engine.ok("GET", f"{PHOTOS}?seq=2")["objects"]] == ["a/1"]
    assert engine.ok("GET", f"{MAIN}/buckets") == {"buckets": ["photos"]}


def test_marks_move_and_changes_are_read(engine: Served) -> None:
    """The low-water mark, a rollback above it, and the entries in order."""
    for seq in (2, 3, 4):
        engine.ok("PUT", f"{PHOTOS}/cat?seq={seq}", str(seq).encode(), OCTETS)
    assert engine.ok("POST", f"{MAIN}/low-water-mark", {"seq": 2})["low_water_mark"] == 2
    assert engine.ok("POST", f"{MAIN}/rollback", {"seq": 3})["applied_seq"] == 3
    assert engine.call("POST", f"{MAIN}/rollback", {"seq": 1}).status in (400, 409)
    read = engine.ok("GET", f"{MAIN}/changes?start_seq=2&limit=1&with_values=true")
    assert [(one["seq"], one["entry"]["data"]) for one in read["changes"]] == [(2, text(b"2"))]
    rest = engine.ok("GET", f"{MAIN}/changes?start_seq={read['next_seq']}")
    assert (rest["next_seq"], rest["changes"][0]["entry"]["key"]) == (4, "cat")
    assert "data" not in rest["changes"][0]["entry"]  # not asked for, which is not an empty value
    (listed,) = engine.ok("GET", "/v1/engines")["engines"]
    described = engine.ok("GET", MAIN)
    assert (listed["name"], listed["applied_seq"], described["statistics"]["applied_seq"]) == ("main", 3, 3)


def test_engine_operations_have_results(engine: Served, tmp_path: Path) -> None:
    """Checkpoint, verification and the plan for garbage; shipping needs a store."""
    engine.ok("PUT", f"{PHOTOS}/cat?seq=2", b"1", OCTETS)
    assert ended(engine, "POST", f"{MAIN}/checkpoint")["result"] == {"seq": 2}
    assert ended(engine, "POST", f"{MAIN}/verify")["result"]["ok"] is True
    assert ended(engine, "POST", f"{MAIN}/ship")["state"] == "failed"
    digest = engine.call("GET", f"{MAIN}/digest").body
    assert len(digest) == 64


def test_stopped_server_leaves_the_engine_closed(tmp_path: Path) -> None:
    """What was applied over HTTP is read by the library afterwards."""
    with serving(tmp_path / "data", engine=tmp_path / "engine") as served:
        entries = [
            {"seq": 1, "entry": {"type": "CreateBucket", "bucket": "photos"}},
            {"seq": 2, "entry": {"type": "PutObject", "bucket": "photos", "key": "cat", "data": text(b"meow")}},
        ]
        served.ok("POST", f"{MAIN}/apply", {"entries": entries})
    with tidelog.open_engine(tmp_path / "engine") as opened:
        assert opened.read("photos", "cat").data == b"meow"


def test_unknown_engine_is_not_found(served: Served) -> None:
    """The hint says how an engine is served."""
    answer = served.call("GET", "/v1/engines/none")
    assert (answer.status, "--engine" in answer.json["hint"]) == (404, True)

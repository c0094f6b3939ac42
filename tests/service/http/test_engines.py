"""Engines over HTTP: apply, read as of a seq, scan, history, marks."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from tests.log.workbench import wait_until
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
    following = engine.ok("GET", f"{PHOTOS}?delimiter=/&start_after=a/&limit=1")
    assert ([one["key"] for one in following["objects"]], following["is_cut"]) == (["b"], True)
    assert [one["key"] for one in engine.ok("GET", f"{PHOTOS}?start_after=a/1")["objects"]] == ["a/2", "b", "c/1"]
    assert engine.call("GET", f"{PHOTOS}?start_after=a&start=b").status == 400
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
    committed = engine.ok("GET", f"{MAIN}/changes?start_seq=2&committed=true")
    assert ([one["seq"] for one in committed["changes"]], committed["next_seq"]) == ([2], 3)  # what follows is to come
    in_vain = engine.ok("GET", f"{MAIN}/changes?start_seq=4&wait=0.01")
    assert (in_vain["changes"], in_vain["next_seq"], in_vain["rollbacks"]) == ([], 4, 1)
    for rolled_back in ("start_seq=5&rollbacks=0", "start_seq=5&seen_seq=4"):
        assert engine.call("GET", f"{MAIN}/changes?{rolled_back}").status == 409
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


LARGE = 12 << 20


def large(size: int = LARGE) -> bytes:
    """Bytes of which no two pieces are the same."""
    return b"".join(b"%015d\n" % number for number in range(size // 16))


def test_large_body_is_put_and_read_in_pieces(engine: Served, tmp_path: Path) -> None:
    """With and without its length; all of it, ranges of it, and as of its seq."""
    data = large()
    for seq, body in ((2, data), (3, iter([data[: 5 << 20], b"", data[5 << 20 :]]))):
        connection = http.client.HTTPConnection(*engine.address)
        connection.request("PUT", f"{PHOTOS}/big?seq={seq}&metadata=%7B%22n%22%3A1%7D", body, OCTETS)
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["status"]) == (200, "applied")
        connection.close()
    whole = engine.call("GET", f"{PHOTOS}/big?seq=2")
    assert (whole.status, whole.body == data, whole.headers["content-length"]) == (200, True, str(len(data)))
    assert (whole.headers["x-tidelog-seq"], whole.headers["x-tidelog-metadata"]) == ("2", '{"n": 1}')
    assert engine.call("GET", f"{PHOTOS}/big?offset=7&length={5 << 20}").body == data[7 : 7 + (5 << 20)]
    for asked, part in (
        ("bytes=0-0", slice(0, 1)),
        ("bytes=100-", slice(100, None)),
        ("bytes=-100", slice(-100, None)),
        (f"bytes=5-{1 << 40}", slice(5, None)),
    ):
        found = engine.call("GET", f"{PHOTOS}/big", headers={"range": asked})
        assert (found.status, found.body == data[part]) == (206, True)
        first = range(len(data))[part][0]
        assert found.headers["content-range"] == f"bytes {first}-{first + len(found.body) - 1}/{len(data)}"
    for bad in (f"bytes={len(data)}-", "bytes=9-3", "bytes=-0"):
        refused = engine.call("GET", f"{PHOTOS}/big", headers={"range": bad})
        assert (refused.status, refused.headers["content-range"]) == (416, f"bytes */{len(data)}")
    assert engine.call("GET", f"{PHOTOS}/big", headers={"range": "bytes=0-1", "if-range": '"x"'}).status == 200
    for odd in ("bytes=1-2,5-6", "lines=1-2", "bytes=-"):
        assert engine.call("GET", f"{PHOTOS}/big", headers={"range": odd}).status == 200


def test_body_that_breaks_off_leaves_nothing(engine: Served, tmp_path: Path) -> None:
    """Neither an object nor a file, and its seq is free; entries of others are applied while it is under way."""
    with socket.create_connection(engine.address) as client:
        head = f"PUT {PHOTOS}/big?seq=2 HTTP/1.1\r\nhost: {engine.address[0]}\r\ncontent-length: {LARGE}\r\n\r\n"
        client.sendall(head.encode() + large()[: 11 << 20])
        values = tmp_path / "engine" / "values"
        wait_until(lambda: values.is_dir() and any(values.iterdir()), "it is being written")
        engine.ok("PUT", f"{PHOTOS}/small?seq=2", b"small", OCTETS)
    wait_until(lambda: not any(values.iterdir()), "what was written is removed")
    assert engine.call("GET", f"{PHOTOS}/big").status == 404
    behind = engine.call("PUT", f"{PHOTOS}/big?seq=9&seen_seq=8", large(), OCTETS)
    assert (behind.status, "seq 3" in behind.json["hint"]) == (409, True)
    engine.ok("PUT", f"{PHOTOS}/big?seq=3&seen_seq=2", large(), OCTETS)
    assert engine.call("GET", f"{PHOTOS}/big").body == large()


def test_large_value_takes_little_memory_of_the_server(tmp_path: Path) -> None:
    """256 MiB in and out of a server within 64 MiB more than it had."""
    engine = tmp_path / "engine"
    with tidelog.open_engine(engine) as made:
        made.apply(1, tidelog.CreateBucket("photos"))
    command = [str(Path(sys.executable).with_name("tidelog")), "serve", "--dir", str(tmp_path / "data")]
    command += ["--engine", f"main={engine}", "--http", "127.0.0.1:0", "--kafka", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(line.split()[1] for line in server.stdout if line.startswith("http "))
            piece, count = os.urandom(1 << 20), 256
            with tidelog.connect(url) as log:
                main = log.engine("main")
                assert main.apply(2, tidelog.PutObject("photos", "warm", iter([piece] * 10))).status == "applied"
                before = _peak_bytes(server.pid)
                assert main.apply(3, tidelog.PutObject("photos", "big", iter([piece] * count))).status == "applied"
                with main.open_object("photos", "big") as file:
                    assert file.size == count << 20
                    assert all(file.read(1 << 20) == piece for _ in range(count))
                connection = http.client.HTTPConnection(urlsplit(url).netloc)
                connection.request("GET", f"{PHOTOS}/big")
                answer, found = connection.getresponse(), 0
                while data := answer.read(1 << 20):
                    found += len(data)
                connection.close()
            assert found == count << 20
            assert _peak_bytes(server.pid) - before < 64 << 20
        finally:
            server.terminate()


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))

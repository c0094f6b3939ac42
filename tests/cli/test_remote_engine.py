"""Commands about an engine that a server has open: through the socket in its directory, or with --server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Cli
from tests.service.http.serving import Served, serving

import tidelog
from tidelog import CreateBucket, PutObject
from tidelog.client.local_socket import is_served, socket_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of an engine with two versions of one object and one of another."""
    with tidelog.open_engine(tmp_path / "engine") as engine:
        engine.apply(1, CreateBucket("photos"))
        engine.apply(2, PutObject("photos", "cat", b"\x00meow", metadata={"n": 1}))
        engine.apply(3, PutObject("photos", "cat", b"purr"))
        engine.apply(4, PutObject("photos", "dog ?%", b"woof"))
        engine.update_low_water_mark(4)
    return tmp_path / "engine"


@pytest.fixture
def served(directory: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", engine=directory) as running:
        yield running


@pytest.fixture(params=["socket", "url"])
def where(request: pytest.FixtureRequest, served: Served, directory: Path, tmp_path: Path) -> list[str]:
    """The options that lead to the server. The engine has no store: nothing but the server can answer."""
    if request.param == "socket":
        return ["--dir", str(directory)]
    return ["--dir", str(tmp_path / "none"), "--server", f"http://127.0.0.1:{served.address.port}"]


def test_objects_are_read_through_the_server(where: list[str], cli: Cli) -> None:
    """get, stat, ls, scan, versions and digest, now and as of a seq."""
    assert cli("engine", "get", "photos", "cat", *where).out == b"purr"
    assert cli("engine", "get", "photos", "cat", "--seq", 2, *where).out == b"\x00meow"
    stat = cli("engine", "stat", "photos", "cat", "--seq", 2, "--json", *where).json
    assert (stat["size"], stat["seq"], stat["tier"], stat["metadata"]) == (5, 2, "hot", {"n": 1})
    assert cli("engine", "ls", "--json", *where).json == [{"bucket": "photos"}]
    assert [one["key"] for one in cli("engine", "ls", "photos", "--json", *where).json] == ["cat", "dog ?%"]
    assert [one["key"] for one in cli("engine", "ls", "photos", "d", "--json", *where).json] == ["dog ?%"]
    assert b"woof" in cli("engine", "scan", "photos", "--values", *where).out
    assert [one["seq"] for one in cli("engine", "versions", "photos", "cat", "--json", *where).json] == [3, 2]
    assert cli("engine", "digest", "--json", *where).json["seq"] == 4
    missing = cli("engine", "get", "photos", "none", *where)
    assert (missing.code, missing.out) == (3, b"")


def test_keys_are_grouped_by_a_delimiter(directory: Path, tmp_path: Path, cli: Cli) -> None:
    """Here, from a bucket and through a server: a line for each common prefix, which has no size and no seq."""
    lines = [{"seq": 5, "op": "create_bucket", "bucket": "films"}]
    keys = ("a/1", "a/2/x", "a/2/y", "b")
    lines += [
        {"seq": seq, "op": "put_object", "bucket": "films", "key": key, "data": key} for seq, key in enumerate(keys, 6)
    ]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    store = (tmp_path / "store").as_uri()
    assert cli("engine", "apply", "-d", directory, "--store", store, "--low-water-mark", stdin=stdin).code == 0
    assert cli("engine", "ship", "-d", directory).code == 0
    nothing = {"bytes": None, "seq": None, "is_prefix": True}
    expected = [{"key": "a/", **nothing}, {"key": "b", "bytes": 1, "seq": 9, "is_prefix": False}]
    below = [{"key": "a/1", "bytes": 3, "seq": 6, "is_prefix": False}, {"key": "a/2/", **nothing}]

    def check(*where: object) -> None:
        ls = ("engine", "ls", "films")
        assert cli(*ls, "--delimiter", "/", *where, "--json").json == expected
        assert cli(*ls, "a/", "--delimiter", "/", *where, "--json").json == below
        assert cli(*ls, "--delimiter", "/", *where).lines[1:] == ["a/\t\t\ttrue", "b\t1\t9\tfalse"]
        assert [one["key"] for one in cli(*ls, *where, "--json").json] == list(keys)

    check("--dir", directory)
    check("--dir", store)
    with serving(tmp_path / "data", engine=directory) as served:
        check("--server", f"http://127.0.0.1:{served.address.port}")


def test_garbage_is_planned_and_collected_through_the_server(where: list[str], served: Served, cli: Cli) -> None:
    """Without --apply nothing changes; with it states before the horizon are gone."""
    plan = cli("engine", "gc", "--horizon", 4, "--json", *where).json
    assert (plan["is_applied"], plan["plan"]["removable_versions"]) == (False, 1)
    assert cli("engine", "get", "photos", "cat", "--seq", 2, *where).code == 0
    done = cli("engine", "gc", "--horizon", 4, "--apply", "--json", *where).json
    assert (done["is_applied"], done["report"]["removed_versions"]) == (True, 1)
    assert [one["seq"] for one in cli("engine", "versions", "photos", "cat", "--json", *where).json] == [3]
    assert cli("engine", "gc", *where).code == 0


def test_entries_are_applied_and_listed_through_the_server(where: list[str], served: Served, cli: Cli) -> None:
    """apply and changes: the same lines as without a server, and a line that is wrong names itself."""
    lines = b'{"seq": 5, "op": "put_object", "bucket": "photos", "key": "new", "data": "x"}\n'
    assert cli("engine", "apply", "--low-water-mark", *where, stdin=lines).code == 0
    assert served.ok("GET", "/v1/engines/main")["low_water_mark"] == 5
    assert cli("engine", "get", "photos", "new", *where).out == b"x"
    wrong = cli("engine", "apply", *where, stdin=lines + b'{"seq": 4, "op": "create_bucket", "bucket": "late"}\n')
    assert (wrong.code, "line 2" in wrong.err) == (2, True)
    listed = cli("engine", "changes", "--start-seq", 4, "--values", *where).out.decode().splitlines()
    assert [line.split("\t")[0] for line in listed[1:]] == ["4", "5"]


def test_upkeep_is_done_by_the_server(where: list[str], cli: Cli) -> None:
    """checkpoint, compact --index and verify; what needs a store is refused in the words of the library."""
    assert cli("engine", "checkpoint", "--json", *where).json["seq"] == 4
    assert cli("engine", "compact", "--index", "--json", *where).json["cells"] > 0
    assert cli("engine", "verify", "--json", *where).json["ok"] is True
    for command in ("ship", "compact"):
        refused = cli("engine", command, *where)
        assert (refused.code, "store" in refused.err) == (2, True), command


def test_shipping_and_compaction_of_a_store_are_done_by_the_server(tmp_path: Path, cli: Cli) -> None:
    """The report is that of the owner."""
    with tidelog.open_engine(tmp_path / "engine", store=(tmp_path / "store").as_uri()) as engine:
        engine.apply(1, CreateBucket("photos"))
    where = ["--dir", str(tmp_path / "engine")]
    with serving(tmp_path / "data", engine=tmp_path / "engine"):
        shipped = cli("engine", "ship", "--low-water-mark", 1, "--json", *where).json
        assert (shipped["high_water_mark"], shipped["low_water_mark"]) == (1, 1)
        assert cli("engine", "compact", "--grace-seconds", 0, "--json", *where).json["waiting_objects"] == 0
        assert cli("engine", "verify", *where).code == 0


def test_status_has_the_marks(where: list[str], cli: Cli) -> None:
    """From the files where they are here, from the server where it is named."""
    shown = cli("engine", "status", "--json", *where).json
    assert shown["low_water_mark"] == 4
    assert ("statistics" in shown) is ("--server" in where)
    assert cli("engine", "status", *where).code == 0


def test_engine_is_named_where_it_is_not_clear(served: Served, directory: Path, cli: Cli) -> None:
    """--engine is the server's name of it, and an unknown one is not found."""
    server = ["--server", f"http://127.0.0.1:{served.address.port}"]
    assert cli("engine", "get", "photos", "cat", "--engine", "main", *server).out == b"purr"
    assert cli("engine", "get", "photos", "cat", "--engine", "other", *server).code == 3
    alone = cli("engine", "ls", "--engine", "main", "--dir", directory)
    assert (alone.code, "--server" in alone.err) == (2, True)


def test_server_without_an_engine_says_so(tmp_path: Path, cli: Cli) -> None:
    """Which engine is meant is not guessed."""
    with serving(tmp_path / "data") as served:
        refused = cli("engine", "ls", "--server", f"http://127.0.0.1:{served.address.port}")
    assert (refused.code, "--engine NAME" in refused.err) == (2, True)


def test_directories_of_engines_are_told_to_nobody_else(served: Served, directory: Path) -> None:
    """A path of the server is for those who have the directory."""
    assert [one["directory"] for one in served.ok("GET", "/v1/engines")["engines"]] == [None]
    assert str(directory) not in str(served.ok("GET", "/v1/engines/main"))


def test_socket_in_the_engine_goes_with_the_server(directory: Path, tmp_path: Path, cli: Cli) -> None:
    """Only its owner may open it, and after a stop commands open the engine themselves."""
    with serving(tmp_path / "data", engine=directory):
        assert is_served(directory)
        assert socket_of(directory).stat().st_mode & 0o777 == 0o600
    assert not socket_of(directory).exists()
    assert cli("engine", "get", "photos", "cat", "--dir", directory).out == b"purr"

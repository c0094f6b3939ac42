"""Commands beside a running server: through the socket in the directory, or with --server."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Cli
from tests.service.http.serving import Served, serving

import tidelog
from tidelog.client.local_socket import is_served, socket_of

WAIT_SECONDS = 120


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def served(directory: Path) -> Iterator[Served]:
    with serving(directory) as running:
        yield running


@pytest.fixture(params=["socket", "url"])
def where(request: pytest.FixtureRequest, served: Served, directory: Path, tmp_path: Path) -> list[str]:
    """The options that lead to the server."""
    if request.param == "socket":
        return ["--dir", str(directory)]
    return ["--dir", str(tmp_path / "none"), "--server", f"http://127.0.0.1:{served.address.port}"]


class TestCommands:
    def test_produce_and_consume_go_through_the_server(self, where: list[str], cli: Cli) -> None:
        """What one command produces another one receives, and acknowledges for good."""
        made = cli("produce", "shop/orders", "--json", *where, stdin=b"a\nb\nc\n").json
        assert (made["messages"], made["first_offset"], made["last_offset"]) == (3, 0, 2)
        if "--server" in where:
            assert cli("consume", "shop/orders", "--from", "1", *where).out == b"b\nc\n"
        assert cli("consume", "shop/orders", "-s", "billing", "-n", "2", *where).out == b"a\nb\n"
        assert cli("consume", "shop/orders", "-s", "billing", *where).out == b"c\n"
        assert cli("consume", "shop/orders", "-s", "billing", *where).out == b""

    def test_topics_are_created_changed_and_deleted(self, where: list[str], served: Served, cli: Cli) -> None:
        """Administration does not need the owner to stop."""
        assert cli("topic", "create", "shop/orders", "--partitions", "2", *where).code == 0
        again = cli("topic", "create", "shop/orders", *where)
        assert (again.code, "--if-missing" in again.err) == (2, True)
        changed = cli("topic", "set", "shop/orders", "retention_seconds=7d", "--json", *where).json
        assert changed["settings"]["retention_seconds"] == 7 * 86400
        assert served.ok("GET", "/v1/topics/shop/orders")["settings"]["retention_seconds"] == 7 * 86400
        assert cli("topic", "prune", "shop/orders", *where).code == 0
        assert cli("topic", "delete", "shop/orders", "--yes", *where).code == 0
        assert served.ok("GET", "/v1/topics")["topics"] == []

    def test_subscription_is_moved_while_it_has_a_consumer(self, where: list[str], served: Served, cli: Cli) -> None:
        """sub seek works beside the owner, and its consumer goes on from there."""
        served.produce("shop/orders", *"abc")
        url = f"http://127.0.0.1:{served.address.port}"
        with tidelog.connect(url, prefetch=1) as log, log.topic("shop/orders").subscribe("billing") as sub:
            message = sub.receive(WAIT_SECONDS)
            assert message is not None
            sub.ack(message)
            sub.flush()
            moved = cli("sub", "seek", "shop/orders", "billing", "-1", "--json", *where).json
            assert moved["offset"] == 2
        if "--server" in where:
            assert cli("sub", "lag", "shop/orders", "--json", *where).json[0]["lag_messages"] == 1
            assert cli("sub", "list", "--json", *where).json[0]["subscription"] == "billing"
        assert cli("sub", "delete", "shop/orders", "billing", "--yes", *where).code == 0

    def test_refusal_of_the_server_names_the_fix(self, where: list[str], served: Served, cli: Cli) -> None:
        """A topic without a store cannot be shipped or sealed; the words are those of the library."""
        served.produce("shop/orders", "a")
        refused = cli("topic", "seal", "shop/orders", *where)
        assert refused.code == 2
        assert "no object store" in refused.err
        assert cli("sub", "seek", "shop/orders", "none", "0", *where).code == 3
        assert "tidelog sub list" in cli("sub", "seek", "shop/orders", "none", "0", *where).err

    def test_dead_letters_are_listed_and_replayed(self, served: Served, directory: Path, cli: Cli) -> None:
        """dlq works through a server on another machine."""
        server = ["--dir", str(directory.with_name("none")), "--server", f"http://127.0.0.1:{served.address.port}"]
        with tidelog.connect(f"http://127.0.0.1:{served.address.port}") as log:
            topic = log.topic("shop/orders")
            topic.append(b"poison")
            options: Any = {"max_deliveries": 1, "on_exhausted": "dead_letter", "dead_letter_topic": "shop/dead"}
            with topic.subscribe("billing", **options) as sub:
                message = sub.receive(WAIT_SECONDS)
                assert message is not None
                sub.nack(message, reason="cannot parse")
                next(iter(log.topic("shop/dead").read(follow=True)))
            assert cli("dlq", "list", "shop/dead", "--json", *server).json[0]["nack_reason"] == "cannot parse"
            assert cli("dlq", "replay", "shop/dead", "--json", *server).json[0]["messages"] == 1
            assert [message.value for message in topic.read()] == [b"poison", b"poison"]

    def test_unreachable_server_is_an_error_with_a_hint(self, cli: Cli) -> None:
        """Nobody at the URL: exit code 4, and what to look at."""
        ran = cli("topic", "list", "--server", "http://127.0.0.1:1")
        assert ran.code == 4
        assert "tidelog serve" in ran.err


class TestMore:
    def test_tail_is_rescued_into_another_topic(self, tmp_path: Path, cli: Cli) -> None:
        """What was accepted here and not shipped before a takeover is appended by the server, and discarded."""
        store = (tmp_path / "store").as_uri()
        with tidelog.open(tmp_path / "data", store=store, metadata="bucket") as log:
            log.topic("shop/orders", ship_on_close=False, ship_max_delay_seconds=3600).append(b"kept", sync=True)
        with tidelog.open(tmp_path / "other", store=store, metadata="bucket") as other:
            other.topic("shop/orders", take_over=True).append(b"theirs", sync="shipped")
            other.topic("shop/orders").seal()
        where = ["--dir", str(tmp_path / "data")]
        with serving(tmp_path / "data", store=store) as served:
            served.ok("GET", "/v1/topics/shop/orders")
            (tail,) = cli("topic", "rescue", "shop/orders", "--json", *where).json
            assert tail["messages"] == 1
            served.ok("PUT", "/v1/topics/shop/saved", {})
            done = cli("topic", "rescue", "shop/orders", "--into", "shop/saved", "--json", *where).json
            assert done[0]["appended"] == 1
            assert cli("topic", "rescue", "shop/orders", "--discard", "--yes", *where).code == 0
            assert cli("topic", "rescue", "shop/orders", "--json", *where).json == []
            assert cli("consume", "shop/saved", *where).out == b"kept\n"

    def test_tails_of_a_topic_with_partitions_are_rescued_by_the_server(self, tmp_path: Path, cli: Cli) -> None:
        """Listed with their partitions, written to a file beside the server, and appended where they came from. The
        name of a partition is answered with what to type, and a topic that is not there with a command."""
        store = (tmp_path / "store").as_uri()
        with tidelog.open(tmp_path / "data", store=store, metadata="bucket") as log:
            topic = log.topic("shop/orders", partitions=2, ship_on_close=False, ship_max_delay_seconds=3600)
            for number in range(2):
                topic.partition(number).append(b"kept %d" % number, key=b"one key", sync=True)
        with tidelog.open(tmp_path / "other", store=store, metadata="bucket") as other:
            for number in range(2):
                other.topic("shop/orders", take_over=True).partition(number).append(b"theirs", sync="shipped")
            other.topic("shop/orders").seal()
        where = ["--dir", str(tmp_path / "data")]
        with serving(tmp_path / "data", store=store):
            tails = cli("topic", "rescue", "shop/orders", "--json", *where).json
            assert [(one["partition"], one["messages"]) for one in tails] == [(0, 1), (1, 1)]
            output = tmp_path / "tail.jsonl"
            assert cli("topic", "rescue", "shop/orders", "--output", str(output), *where).code == 0
            lines = [json.loads(line) for line in output.read_text().splitlines()]
            assert [(one["partition"], one["value"]) for one in lines] == [(0, "kept 0"), (1, "kept 1")]
            for appended in (1, 0):
                done = cli("topic", "rescue", "shop/orders", "--into", "shop/orders", "--json", *where).json
                assert [one["appended"] for one in done] == [appended, appended]
            for number in range(2):
                found = cli("consume", "shop/orders", "--partition", str(number), *where).out
                assert found == b"theirs\nkept %d\n" % number
            refused = cli("topic", "rescue", "shop/orders-part-1", *where)
            assert (refused.code, "topic rescue shop/orders" in refused.err) == (3, True)
            assert "topic list" in cli("topic", "rescue", "shop/none", *where).err

    def test_server_verifies_its_topics(self, served: Served, tmp_path: Path, cli: Cli) -> None:
        """From a machine that has no file of it."""
        served.produce("shop/orders", *"abc")
        server = ["--dir", str(tmp_path / "none"), "--server", f"http://127.0.0.1:{served.address.port}"]
        (found,) = cli("verify", "--json", *server).json
        assert (found["target"], found["frames"], found["ok"]) == ("shop/orders", 3, True)
        assert cli("verify", "shop/none", *server).code == 3


class TestPlans:
    def test_retention_deletes_what_the_plan_has_shown(self, tmp_path: Path, cli: Cli) -> None:
        """--dry-run shows it with an id, and --plan deletes that; a second time it is a conflict."""
        where = ["--dir", str(tmp_path / "data")]
        with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
            settings = {"retention_bytes": 100, "retention_interval_seconds": 3600}
            served.ok("PUT", "/v1/topics/shop/orders", {"settings": settings})
            served.produce("shop/orders", "x" * 200)
            assert cli("topic", "ship", "shop/orders", *where).code == 0
            (due,) = cli("topic", "prune", "shop/orders", "--dry-run", "--json", *where).json
            assert (due["messages"], due["objects"]) == (1, 1)
            assert served.ok("GET", "/v1/topics/shop/orders")["partitions"][0]["start_offset"] == 0
            assert cli("topic", "prune", "shop/orders", "--plan", due["plan"], *where).code == 0
            assert served.ok("GET", "/v1/topics/shop/orders")["partitions"][0]["start_offset"] == 1
            again = cli("topic", "prune", "shop/orders", "--plan", due["plan"], *where)
            assert (again.code != 0, "changed" in again.err) == (True, True)

    def test_orphans_are_removed_by_the_server(self, tmp_path: Path, cli: Cli) -> None:
        """remove-orphans works beside the owner, plan first, then exactly that plan."""
        where = ["--dir", str(tmp_path / "data")]
        with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
            served.produce("shop/orders", "a", "b")
            assert cli("topic", "ship", "shop/orders", *where).code == 0
            (published,) = (tmp_path / "store").rglob("*.tlog")
            orphan = published.with_name("data-0-1-e0.tlog")
            orphan.write_bytes(published.read_bytes())
            (shown,) = cli("topic", "remove-orphans", "shop/orders", "--json", *where).json
            assert ([one["reason"] for one in shown["found"]], orphan.exists()) == (["orphan"], True)
            assert "--apply --plan " in cli("topic", "remove-orphans", "shop/orders", *where).err
            done = cli("topic", "remove-orphans", "shop/orders", "--apply", "--plan", shown["plan"], "--json", *where)
            assert (done.code, done.json[0]["is_applied"], orphan.exists()) == (0, True, False)
            wrong = cli("topic", "remove-orphans", "shop/orders", "--apply", "--plan", "none", *where)
            assert wrong.code != 0

    def test_garbage_is_collected_by_the_plan_that_was_shown(self, tmp_path: Path, cli: Cli) -> None:
        """engine gc gives the plan an id, and collects by it."""
        where = ["--dir", str(tmp_path / "engine")]
        with tidelog.open_engine(tmp_path / "engine") as engine:
            engine.apply(1, tidelog.CreateBucket("photos"))
            for seq in range(2, 7):
                engine.apply(seq, tidelog.PutObject("photos", "cat", b"x" * seq))
            engine.update_low_water_mark(6)
        with serving(tmp_path / "data", engine=tmp_path / "engine"):
            shown = cli("engine", "gc", "--horizon", "5", *where)
            assert "--apply --plan " in shown.err
            plan = cli("engine", "gc", "--horizon", "5", "--json", *where).json["plan"]
            done = cli("engine", "gc", "--apply", "--plan", plan["id"], "--json", *where).json
            assert done["report"]["removed_versions"] == plan["removable_versions"] == 3
            again = cli("engine", "gc", "--apply", "--plan", plan["id"], *where)
            assert (again.code != 0, "changed" in again.err) == (True, True)

    def test_plan_without_a_server_is_refused(self, tmp_path: Path, cli: Cli) -> None:
        """Plans have ids where a server has made them."""
        with tidelog.open(tmp_path / "data") as log:
            log.topic("shop/orders").append(b"a")
        refused = cli("topic", "prune", "shop/orders", "--plan", "x", "--dir", str(tmp_path / "data"))
        assert (refused.code, "plan of a server" in refused.err) == (2, True)
        (due,) = cli("topic", "prune", "shop/orders", "--dry-run", "--json", "--dir", str(tmp_path / "data")).json
        assert due["messages"] == 0


class TestSocket:
    def test_only_the_owner_may_open_the_socket(self, served: Served, directory: Path) -> None:
        """It has the power over everything in the directory, and the permissions of it."""
        mode = os.stat(socket_of(directory)).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600

    def test_socket_goes_with_the_server(self, directory: Path) -> None:
        """After a stop the directory is free, and says so."""
        with serving(directory):
            assert is_served(directory)
        assert not socket_of(directory).exists()
        assert not is_served(directory)

    def test_socket_of_a_killed_server_is_replaced(self, directory: Path, cli: Cli) -> None:
        """Loss prevented: after kill -9 commands tried the dead socket, and the next server could not listen."""
        directory.mkdir()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(socket_of(directory)))
        assert not is_served(directory)
        assert cli("produce", "shop/orders", "--dir", str(directory), stdin=b"a\n").code == 0
        with serving(directory):
            assert is_served(directory)
            assert cli("produce", "shop/orders", "--dir", str(directory), stdin=b"b\n").code == 0

    def test_long_path_works(self, tmp_path: Path, cli: Cli) -> None:
        """A socket's own path has 107 bytes; a directory may be deeper than that."""
        deep = tmp_path.joinpath(*["d" * 50] * 4) / "data"
        with serving(deep):
            assert is_served(deep)
            made = cli("produce", "shop/orders", "--json", "--dir", str(deep), stdin=b"a\n").json
            assert made["messages"] == 1
            assert cli("consume", "shop/orders", "-s", "billing", "--dir", str(deep)).out == b"a\n"

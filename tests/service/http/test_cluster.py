"""The cluster over HTTP: any node shows it and takes requests, as the command line does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster.test_engine_host import NAME, WAIT_SECONDS, Nodes, clustered, run
from tests.cluster.test_runtime import until
from tests.servers import EtcdServer
from tests.service.http.serving import serving
from tests.service.http.test_placed import Answer

from tidelog.service.auth.access import Kind, Permission
from tidelog.service.http.app import TABLE
from tidelog.topics.names import parse_topic_name

CLUSTER = "/v1/cluster"
TOPIC = "shop/orders"


async def asked(nodes: Nodes, number: int, method: str, path: str, body: Any = None, status: int = 200) -> Any:
    answer = await nodes.ask(Answer, nodes.all[number].url, method, f"{CLUSTER}/{path}", body)
    assert answer.status == status, answer.json
    return answer.json


def test_cluster_is_shown_and_moved_through_any_node(tmp_path: Path, etcd_server: EtcdServer) -> None:
    """Status, nodes, plan, decisions with reasons; a partition and an engine are moved, a node is drained and back."""

    async def work() -> None:
        async with clustered(tmp_path, etcd_server.url) as nodes:
            first = nodes.all[0]
            await until(lambda: len(first.cluster.placement.nodes()) == 2)
            made = await nodes.ask(Answer, first.url, "PUT", f"/v1/topics/{TOPIC}", {"partitions": 2})
            assert made.status in (200, 201)
            await asked(nodes, 1, "PUT", f"engines/{NAME}", {}, 204)
            assert (await asked(nodes, 0, "PUT", f"engines/{NAME}", {}, 409))["error"] == "ConflictError"
            await nodes.owned()
            placed = lambda state: "" not in state.topics[parse_topic_name(TOPIC)].partitions  # noqa: E731
            assert await nodes.ask(nodes.operations.until, placed, WAIT_SECONDS)

            status = await asked(nodes, 1, "GET", "status")
            assert (status["nodes"], status["partitions"], status["engines"]) == (2, 2, 1)
            assert (status["unassigned"], status["unassigned_engines"]) == (0, 0)
            found = (await asked(nodes, 0, "GET", "nodes"))["nodes"]
            assert [(one["name"], one["state"]) for one in found] == [("n1", "alive"), ("n2", "alive")]
            assert [one["http"] for one in found] == [one.url for one in nodes.all]
            assert sum(one["is_leader"] for one in found) == 1

            planned = (await asked(nodes, 1, "GET", "plan?drain=n2"))["decisions"]
            assert {"shop/orders"} <= {one["what"].rpartition("/")[0] for one in planned if one["from"] == "n2"}
            assert (await asked(nodes, 1, "GET", "plan?lose=n9", status=404))["error"] == "NotFoundError"

            (topic,) = (await asked(nodes, 1, "GET", "topics"))["topics"]
            assert (topic["name"], len(topic["partitions"]), topic["pins"]) == (TOPIC, 2, {})
            assert set(topic["partitions"]) <= {"n1", "n2"}

            move = {"engine": NAME, "node": nodes.other.name, "pin": True}
            assert await asked(nodes, 0, "POST", "move?wait=60", move) == {"is_done": True}
            (engine,) = (await asked(nodes, 1, "GET", "engines"))["engines"]
            assert (engine["node"], engine["pin"]) == (move["node"], move["node"])
            assert await asked(nodes, 1, "POST", "unpin", {"engine": NAME}) == {"is_changed": True}
            assert await asked(nodes, 1, "POST", "unpin", {"engine": NAME}) == {"is_changed": False}
            for node in ("n1", "n2"):
                body = {"topic": TOPIC, "partition": 0, "node": node}
                assert await asked(nodes, 0, "POST", "move?wait=60", body) == {"is_done": True}
            await asked(nodes, 0, "POST", "move", {"node": "n1"}, 400)
            await asked(nodes, 0, "POST", "move", {"node": "n1", "topic": TOPIC, "engine": NAME}, 400)
            await asked(nodes, 0, "POST", "move", {"node": "n9", "engine": NAME}, 404)

            assert await asked(nodes, 0, "POST", "drain?wait=60", {"node": "n2"}) == {"is_done": True}
            assert (await asked(nodes, 1, "GET", "nodes"))["nodes"][1]["state"] == "drained"
            await nodes.owned()
            assert nodes.owner is first
            assert await asked(nodes, 1, "POST", "undrain", {"node": "n2"}) == {"is_changed": True}
            assert await asked(nodes, 1, "POST", "balance?wait=60") == {"is_done": True}

            decided = (await asked(nodes, 1, "GET", "decisions?last=1000"))["decisions"]
            assert not any(one["what"].startswith("slot") for one in decided)
            with_slots = (await asked(nodes, 1, "GET", "decisions?last=1000&slots=true"))["decisions"]
            assert any(one["what"].startswith("slot") for one in with_slots)
            planned = (await asked(nodes, 1, "GET", "plan?drain=n2"))["decisions"]
            assert not any(one["what"].startswith("slot") for one in planned)
            assert {"n2 is being drained", "nobody serves it"} <= {one["reason"] for one in decided}
            assert (f"engine {NAME}", "drain") in {(one["what"], one["kind"]) for one in decided}
            assert len((await asked(nodes, 1, "GET", "decisions?last=1"))["decisions"]) == 1
            assert isinstance((await asked(nodes, 1, "GET", "restore-point"))["unshipped"], list)
            await asked(nodes, 0, "POST", "drain", {"node": "n1"})
            refused = await asked(nodes, 1, "POST", "drain", {"node": "n2"}, 400)
            assert "no other node can take what n2 has" in refused["detail"]
            assert await asked(nodes, 1, "POST", "undrain", {"node": "n1"}) == {"is_changed": True}
            await asked(nodes, 0, "DELETE", f"engines/{NAME}", status=204)
            await until(lambda: not any(node.has() for node in nodes.all))

    run(work)


def test_node_by_itself_has_no_cluster(tmp_path: Path) -> None:
    """It says so."""
    with serving(tmp_path) as served:
        answer = served.call("GET", f"{CLUSTER}/status")
        assert (answer.status, answer.json["error"]) == (404, "NotFoundError")
        assert "by itself" in answer.json["detail"]


def test_cluster_is_for_who_administrates_the_server() -> None:
    """Looking, too: it is about all topics and engines."""
    found = [route for route in TABLE if route.path.startswith(CLUSTER)]
    assert len(found) > 10
    assert {(route.permission, route.resource) for route in found} == {(Permission.ADMIN, Kind.SERVER)}

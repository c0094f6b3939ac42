"""Several nodes with TLS and authentication on both sides: clients, nodes among themselves, and who sees a token."""

from __future__ import annotations

import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from tests.service.auth.certificates import Authority
from tests.service.http.test_placed import TOPIC, in_thread
from tests.service.installation import Installation, installed, run
from tests.service.kafka.secured import PASSWORD, add_users, change_accounts, grant

import tidelog
from tidelog.config.serve import ServeSettings
from tidelog.errors import AccessDeniedError, DataError
from tidelog.service.auth.access import LOCAL, topic_resource
from tidelog.service.auth.accounts import Change, adding_token, granting, make_token
from tidelog.service.auth.security import Security

WAIT_SECONDS = 100


class Cluster:
    """Three nodes, each with a certificate of its own, and what a client needs."""

    def __init__(self, root: Path) -> None:
        self.authority = Authority(root / "certificates")
        self.nodes: Installation
        self.token = ""
        self.tokens: dict[str, str] = {}

    def adding(self, name: str) -> Change:
        """A token for somebody else."""
        new, token = make_token(name, 0)
        self.tokens[name] = new.text
        return adding_token(new.id, token)

    def looked(self, name: str, number: int, target: str) -> tuple[int, Any]:
        """What a node shows to a page of its console, which cannot follow to another one."""
        headers = {"authorization": f"Bearer {self.tokens.get(name, self.token)}", "x-tidelog-redirect": "no"}
        request = urllib.request.Request(self.nodes.addresses[number].http + target, headers=headers)
        try:
            with urllib.request.urlopen(request, context=self.trust, timeout=WAIT_SECONDS) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, None

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority.path)

    def secure(self, number: int) -> Security:
        files = self.authority.signed(f"node{number}", f"node{number}")
        tls: dict[str, Any] = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": self.authority.path}
        return Security(ServeSettings(auth="required", **tls))

    @property
    def url(self) -> str:
        return self.nodes.addresses[1].http

    def connect(self) -> tidelog.Client:
        return tidelog.connect(self.url, token=self.token, tls_ca=self.authority.path, timeout=WAIT_SECONDS)

    def kafka(self, **settings: Any) -> dict[str, Any]:
        host, port = self.nodes.addresses[1].kafka
        return {
            "bootstrap.servers": f"{host}:{port}",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "alice",
            "sasl.password": PASSWORD,
            "ssl.ca.location": self.authority.path,
            **settings,
        }


@asynccontextmanager
async def secured(root: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(root)
    new, token = make_token("alice", 0)
    cluster.token = new.text
    with tidelog.open(
        root / "admin", store=f"file://{root}/bucket", metadata=f"sqlite://{root}/catalog.db"
    ) as directory:
        add_users(directory, "alice")
        patterns = ("topic:shop/*", "group:*", "transaction:*")
        change_accounts(
            directory, adding_token(new.id, token), granting(*(grant(f"alice admin {one}") for one in patterns))
        )
        change_accounts(directory, *map(cluster.adding, ("bob", "mallory")), granting(grant("bob read topic:shop/*")))
    async with installed(root, 3, secure=cluster.secure) as nodes:
        cluster.nodes = nodes
        assert all(node.http.startswith("https://") for node in nodes.addresses.values())
        await nodes.create_topic(TOPIC, 3)
        await nodes.move_slot("copier", 2)
        await nodes.give_slots(3)
        yield cluster


def use_http(cluster: Cluster) -> int:
    """Appends to all nodes, and consumes from all nodes."""
    with cluster.connect() as client:
        topic: Any = client.topic(TOPIC)
        topic.append_many([tidelog.Message(b"v", b"k%d" % number) for number in range(9)], sync=True)
        with topic.subscribe("billing") as consumer:
            for _ in range(9):
                message = consumer.receive(timeout=WAIT_SECONDS)
                assert message is not None
                consumer.ack(message)
        assert topic.verify().ok
        return sum(topic.next_offsets.values())


def use_kafka(cluster: Cluster) -> int:
    """A transaction over the partitions of all nodes, whose coordinator is on the second, read by a group whose
    coordinator is on the third."""
    producer = Producer(cluster.kafka(**{"transactional.id": "copier"}))
    producer.init_transactions(WAIT_SECONDS)
    producer.begin_transaction()
    for partition in range(3):
        producer.produce("shop.orders", b"of a transaction", partition=partition)
    producer.commit_transaction(WAIT_SECONDS)
    consumer = Consumer(
        cluster.kafka(**{"group.id": "g", "auto.offset.reset": "earliest", "isolation.level": "read_committed"})
    )
    consumer.subscribe(["shop.orders"])
    found = 0
    for _ in range(WAIT_SECONDS * 10):
        found += sum(one.error() is None for one in consumer.consume(10, 0.1))
        if found >= 3:
            break
    consumer.close()
    return found


def use_command(cluster: Cluster) -> Any:
    command = [sys.executable, "-m", "tidelog.cli.main", "sub", "list", TOPIC, "--json", "--server", cluster.url]
    environment = {**os.environ, "TIDELOG_TOKEN": cluster.token, "TIDELOG_TLS_CA": cluster.authority.path}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=2 * WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_clients_of_both_sides_use_nodes_with_tls_and_authentication(tmp_path: Path) -> None:
    """Requests are sent on and put together, transactions are ended on every node, and the command line follows, all
    with credentials; a wrong token is refused."""

    async def work() -> None:
        async with secured(tmp_path) as cluster:
            assert await in_thread(use_kafka, cluster) == 3
            assert await in_thread(use_http, cluster) == 9 + 2 * 3
            listed = await in_thread(use_command, cluster)
            assert {row["subscription"] for row in listed} >= {"billing"}
            secret = cluster.nodes.nodes[1].security.node_secret
            with pytest.raises(AccessDeniedError):
                await in_thread(lambda: tidelog.connect(cluster.url, token=secret + "x", tls_ca=cluster.authority.path))

    run(work())


def test_accounts_are_those_of_the_installation(tmp_path: Path) -> None:
    """Users, tokens and grants are in the metadata store: whichever node is lost, the others know them."""

    async def work() -> None:
        async with secured(tmp_path) as cluster:
            await cluster.nodes.stop_node(2)
            await cluster.nodes.stop_node(3)
            for partition in (1, 2):
                await cluster.nodes.move(TOPIC, partition, 1)
            assert await in_thread(use_http, cluster) == 9

    run(work())


@contextmanager
def answering(answer: Any) -> Iterator[tuple[str, list[str]]]:
    """A server of HTTP that is none of ours: its URL, and the credentials that it was shown."""
    shown: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers.get("authorization", ""))
            status, headers, body = answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", shown
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_token_goes_to_listed_nodes_only() -> None:
    """A server that sends requests on to a host which it does not list as its node is refused, and that host is shown
    nothing; one that it lists gets the token."""
    listed: list[str] = []
    elsewhere = ""

    def answer(path: str) -> Any:
        if path == "/v1/nodes":
            return 200, {}, json.dumps({"nodes": [{"node": "b", "http": url} for url in listed]}).encode()
        if path.startswith("/v1/topics?"):
            return 200, {}, b'{"topics": []}'
        return 307, {"x-tidelog-location": elsewhere + path}, b""

    with answering(lambda path: (404, {}, b"")) as (other, shown), answering(answer) as (url, _):
        elsewhere = other
        with tidelog.connect(url, token="PLANTED-token") as client:
            with pytest.raises(DataError, match="none of its nodes"):
                client.has_topic(TOPIC)
            assert shown == []
            listed.append(other)
            assert not client.has_topic(TOPIC)
            assert shown == ["Bearer PLANTED-token"]


def test_a_node_sends_its_secret_to_nodes_only(tmp_path: Path) -> None:
    """Whatever an answer says: a node that was taken over by somebody else cannot send it elsewhere."""

    async def work() -> None:
        async with secured(tmp_path) as cluster:
            others = cluster.nodes.nodes[1].http.others
            assert others is not None
            asking = others.http(cluster.nodes.addresses[2])
            with pytest.raises(DataError, match="none of its nodes"):
                await asking.node_at("https://127.0.0.1:1/v1/topics", asking)
            found, _ = await asking.node_at(f"{cluster.nodes.addresses[3].http}/v1/topics", asking)
            assert found.headers["authorization"] == asking.headers["authorization"]
            assert isinstance(found.tls, ssl.SSLContext)

    run(work())


def test_another_node_shows_a_client_no_more_than_its_own(tmp_path: Path) -> None:
    """A page that cannot follow gets the answer of the node that has it, with what its user may see: neither
    operations nor subscriptions of others, nor the files of findings."""
    finding = dict.fromkeys(("subject", "kind", "severity", "first_offset", "last_offset", "unit"))

    def subscribe(cluster: Cluster) -> None:
        with cluster.connect() as client, client.topic("shop/alone").subscribe("billing"):
            pass

    async def found(_: Any) -> Any:
        return {"findings": [{**finding, "path": "/secret"}], "notes": ["/secret"]}

    async def work() -> None:
        async with secured(tmp_path) as cluster:
            await cluster.nodes.create_topic("shop/alone", 1)
            await cluster.nodes.move("shop/alone", 0, 2)
            await in_thread(subscribe, cluster)
            operations = cluster.nodes.nodes[2].http.operations
            operation = operations.start("verify", topic_resource(TOPIC), LOCAL, found)
            await operations.wait(operation.id, WAIT_SECONDS)
            path, listed = f"/v1/operations/{operation.id}", "/v1/topics/shop/alone/subscriptions"
            for number in (1, 2):
                status, shown = await in_thread(cluster.looked, "alice", number, path)
                assert (status, shown["result"]["notes"]) == (200, ["/secret"])
                status, shown = await in_thread(cluster.looked, "bob", number, path)
                assert (status, shown["result"]) == (200, {"findings": [finding], "notes": []})
                assert await in_thread(cluster.looked, "mallory", number, path) == (403, None)
                assert await in_thread(cluster.looked, "mallory", number, "/v1/operations/0-2") == (403, None)
            for number in (1, 2):
                assert (await in_thread(cluster.looked, "alice", number, listed))[1]["subscriptions"]
                assert (await in_thread(cluster.looked, "bob", number, listed))[1] == {"subscriptions": []}

    run(work())

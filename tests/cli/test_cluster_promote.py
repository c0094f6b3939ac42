"""`tidelog cluster promote`, with a real etcd and a real S3 server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from tests.cli.conftest import Cli
from tests.cluster.test_engine_host import NAME as ENGINE
from tests.cluster.test_engine_host import WAIT_SECONDS, ServingNode, filled
from tests.cluster.test_engine_host import keys as engine_keys
from tests.cluster.test_runtime import until
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, EtcdServer, S3Server

import tidelog
from tidelog.cli.cluster.dev import NodeProcess
from tidelog.cli.dev_s3 import S3Keys, SeaweedServer
from tidelog.cli.errors import ExitCode
from tidelog.cluster.documents import ClusterState, decoded
from tidelog.cluster.operations import ClusterOperations
from tidelog.config import load_engine_config
from tidelog.secret import Secret
from tidelog.service.cluster_control import NodeTail
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

NAME = "shop/orders"


@pytest.fixture
def prefix(s3_server: S3Server, etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of two stores in one bucket, and of the keys in etcd: nobody else has it."""
    found = f"promote-{uuid4().hex[:8]}"
    monkeypatch.setenv("TIDELOG_STORE_ENDPOINT", s3_server.endpoint)
    monkeypatch.setenv("TIDELOG_STORE_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("TIDELOG_STORE_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    monkeypatch.setenv("TIDELOG_METADATA_ROOT", found)
    monkeypatch.setenv("TIDELOG_METADATA", etcd_server.url)
    return found


def test_promotion_says_what_is_lost_and_the_topic_goes_on(
    cli: Cli, tmp_path: Path, s3_server: S3Server, prefix: str
) -> None:
    """It is refused without a confirmation, shows the loss, and nodes of the new store go on after what it has."""
    first, second = s3_server.url(f"{prefix}/first"), s3_server.url(f"{prefix}/second")
    quiet: dict[str, Any] = {"ship_interval_seconds": 3600.0}
    with tidelog.open(tmp_path / "a", store=first, replication_mode="sync", **quiet) as log:
        log.topic(NAME, replicas=[second]).append(b"in both", sync=True)
        log.topic(NAME).ship()
    with tidelog.open(tmp_path / "a", store=first, **quiet) as log:
        log.configure_topic(NAME, replicas=None)
    with tidelog.open(tmp_path / "a", store=first, **quiet) as log:
        log.topic(NAME).append(b"in the first alone", sync=True)
        log.topic(NAME).ship()
    shown = cli("cluster", "promote", "--store", second, "--dry-run", "--json")
    assert shown.code == 0, shown.err
    assert shown.json["logs"] == [
        {"kind": "topic", "log": NAME, "catalog": 2, "replica": 1, "lost": 1, "unshipped": None}
    ]
    assert shown.json["done"] is False
    refused = cli("cluster", "promote", "--store", second)
    assert (refused.code, "Pass --yes" in refused.err) == (ExitCode.BAD_INPUT, True)
    done = cli("cluster", "promote", "--store", second, "--yes", "--json")
    assert (done.code, done.json["first"], done.json["lost"]) == (0, first, 1)
    with tidelog.open(tmp_path / "b", store=second, **quiet) as log:
        assert [message.value for message in log.topic(NAME).read(0)] == [b"in both"]
        assert log.topic(NAME).append(b"goes on", sync=True) == 1


def secret(kind: type, value: object) -> Secret:
    return Secret(str(value))


def test_replica_on_another_server_is_promoted(
    cli: Cli, tmp_path: Path, s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two S3 servers with keys of their own: a topic is copied from one to the other, the first is lost, and the second
    goes on with what it has; the same settings reach either. An engine has its replica there, too."""
    keys = S3Keys("second", Secret("PLANTED-second-key"))
    second_server = SeaweedServer(tmp_path / "second", bucket="second", keys=keys)
    second_server.start()
    try:
        own = {"store_endpoint": second_server.endpoint, "store_access_key_id": "second"}
        own["store_secret_access_key"] = "PLANTED-second-key"
        second = f"s3://second/{prefix}"
        monkeypatch.setenv("TIDELOG_REPLICA_STORES", json.dumps({"s3://second": own}))
        first = s3_server.url(f"{prefix}/first")
        quiet: dict[str, Any] = {"ship_interval_seconds": 3600.0, "replication_mode": "sync"}
        with tidelog.open(tmp_path / "a", store=first, **quiet) as log:
            log.topic(NAME, replicas=[second]).append(b"in both", sync="shipped")
        with tidelog.open_engine(
            tmp_path / "e", store=f"{first}-e", replicas=[f"{second}-e"], replication_mode="sync"
        ) as engine:
            engine.apply(1, tidelog.CreateBucket("b"))
            engine.apply(2, tidelog.PutObject("b", "k", b"v"))
            engine.ship()
        with tidelog.open(tmp_path / "a", store=first, replication_mode="async", ship_interval_seconds=3600.0) as log:
            log.configure_topic(NAME, replicas=None)
        with tidelog.open(tmp_path / "a", store=first, ship_interval_seconds=3600.0) as log:
            log.topic(NAME).append(b"in the first alone", sync="shipped")
        monkeypatch.setenv("TIDELOG_STORE_ENDPOINT", "http://127.0.0.1:1")  # the first server is lost
        shown = cli("cluster", "promote", "--store", second, "--dry-run", "--json")
        assert [(row["catalog"], row["replica"], row["lost"]) for row in shown.json["logs"]] == [(2, 1, 1)], shown.err
        done = cli("cluster", "promote", "--store", second, "--yes", "--json")
        assert (done.code, done.json["lost"]) == (0, 1), done.err
        assert "PLANTED" not in f"{shown.out!r} {done.out!r} {done.err}"
        with tidelog.open(tmp_path / "b", store=second, ship_interval_seconds=3600.0) as log:
            assert [message.value for message in log.topic(NAME).read(0)] == [b"in both"]
            assert log.topic(NAME).append(b"goes on", sync="shipped") == 1
        settings = StoreSettings(replica_stores={"s3://second": msgspec.convert(own, StoreSettings, dec_hook=secret)})
        assert list(open_store(f"{second}-e", settings).list("")), "the engine has a copy there"
    finally:
        second_server.stop()


def test_engine_of_a_lost_region_is_served_by_a_node_of_the_replica(
    cli: Cli, tmp_path: Path, s3_server: S3Server, etcd_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of two S3 servers, one after the other: entries that only the first one had are counted before, and the
    engine is served by the node of the second one with all others."""
    keys = S3Keys("second", Secret("PLANTED-second-key"))
    second_server = SeaweedServer(tmp_path / "second", bucket="second", keys=keys)
    second_server.start()
    try:
        own = {"store_endpoint": second_server.endpoint, "store_access_key_id": "second"}
        own["store_secret_access_key"] = "PLANTED-second-key"
        monkeypatch.setenv("TIDELOG_REPLICA_STORES", json.dumps({"s3://second": own}))
        first, second = s3_server.url(f"{prefix}/first"), f"s3://second/{prefix}"

        async def serve(name: str, store: str, work: Callable[[ServingNode], object], **settings: Any) -> None:
            config = load_engine_config(None, os.environ, {"ship_interval_seconds": 3600.0, **settings})
            node = ServingNode(tmp_path, name, etcd_server.url, prefix, store)
            await node.start(config)
            try:
                with open_metadata_store(etcd_server.url) as metadata:
                    operations = ClusterOperations(metadata, prefix)
                    if not await asyncio.to_thread(operations.engines):
                        await asyncio.to_thread(operations.add_engine, ENGINE)
                await until(node.has)
                await asyncio.to_thread(work, node)
            finally:
                await node.stop()

        def in_both(node: ServingNode) -> None:
            filled(node.url, 1, 10)
            node.node.http.engines[ENGINE].ship()

        def in_the_first(node: ServingNode) -> None:
            filled(node.url, 10, 13)
            node.node.http.engines[ENGINE].ship()

        def promoted(node: ServingNode) -> None:
            assert engine_keys(node.url) == sorted(f"k{seq}" for seq in range(2, 10))
            assert filled(node.url, 10, 12)[0] == 11

        asyncio.run(serve("n1", first, in_both, replicas=[second], replication_mode="sync"))
        asyncio.run(serve("n1", first, in_the_first))
        monkeypatch.setenv("TIDELOG_STORE_ENDPOINT", "http://127.0.0.1:1")  # the first server is lost
        shown = cli("cluster", "promote", "--store", second, "--dry-run", "--json")
        assert shown.code == 0, shown.err
        assert (shown.json["lost"], shown.json["lost_entries"]) == (0, 3)
        (row,) = shown.json["logs"]
        assert (row["kind"], row["log"], row["catalog"], row["replica"], row["lost"]) == ("engine", ENGINE, 12, 9, 3)
        told = cli("cluster", "promote", "--store", second, "--yes")
        assert told.code == 0, told.err
        asyncio.run(serve("n2", second, promoted))
    finally:
        second_server.stop()


def test_flushes_of_a_lost_region_are_counted_and_a_lost_etcd_makes_the_loss_unknown(
    cli: Cli, tmp_path: Path, s3_server: S3Server, etcd_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node has acknowledged with `durability=shipped`, in flushes of the first server alone, is said beside what
    the catalog knows. Without its etcd nobody knows what was lost, and that is said, too."""
    keys = S3Keys("second", Secret("PLANTED-second-key"))
    second_server = SeaweedServer(tmp_path / "second", bucket="second", keys=keys)
    second_server.start()
    try:
        own = {"store_endpoint": second_server.endpoint, "store_access_key_id": "second"}
        own["store_secret_access_key"] = "PLANTED-second-key"
        monkeypatch.setenv("TIDELOG_REPLICA_STORES", json.dumps({"s3://second": own}))
        monkeypatch.setenv("TIDELOG_SHIP_INTERVAL_SECONDS", "3600")
        monkeypatch.setenv("TIDELOG_CLUSTER_LEASE_SECONDS", "10")
        first, second = s3_server.url(f"{prefix}/first"), f"s3://second/{prefix}"
        options = ["--store", first, "--metadata", etcd_server.url]
        node = NodeProcess("n1", tmp_path / "n1", options, dict(os.environ))
        try:
            node.wait()
            with tidelog.connect(node.http) as client:
                topic = client.topic(NAME, durability="shipped", replicas=[second], replication_mode="sync")
                for number in range(3):
                    topic.append(b"%d" % number, sync=True)
                topic.ship()
                for number in range(4):
                    topic.append(b"in flushes %d" % number, sync=True)
            with open_metadata_store(etcd_server.url) as metadata:
                operations = ClusterOperations(metadata, prefix)

                def has_reported(state: ClusterState) -> bool:
                    tail = decoded(metadata.get(state.keys.tail("n1")), NodeTail)
                    return tail is not None and tail.flushed == {NAME: 4}

                assert operations.until(has_reported, WAIT_SECONDS)
                assert operations.restore_point() == []  # the loss of the node alone would cost nothing
                node.process.kill()
                assert operations.until(lambda state: not state.nodes, WAIT_SECONDS)
        finally:
            node.process.kill()
            node.stop()
        monkeypatch.setenv("TIDELOG_STORE_ENDPOINT", "http://127.0.0.1:1")  # the first server is lost
        shown = cli("cluster", "promote", "--store", second, "--dry-run", "--json")
        assert shown.code == 0, shown.err
        (row,) = shown.json["logs"]
        assert row == {"kind": "topic", "log": NAME, "catalog": 3, "replica": 3, "lost": 0, "unshipped": 4}
        assert (shown.json["lost"], shown.json["unshipped"]) == (0, 4)
        with open_metadata_store(etcd_server.url) as metadata:
            for key in metadata.keys(f"{prefix}/"):
                metadata.delete(key)
        unknown = cli("cluster", "promote", "--store", second, "--dry-run", "--json")
        assert [unknown.json[name] for name in ("lost", "lost_entries", "unshipped")] == [None, 0, None]
        told = cli("cluster", "promote", "--store", second, "--yes")
        assert (told.code, "unknown" in str(told.out), "Users, grants" in told.err) == (0, True, True), told.err
    finally:
        second_server.stop()

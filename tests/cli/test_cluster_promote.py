"""`tidelog cluster promote`, with a real etcd and a real S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.cli.conftest import Cli
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, EtcdServer, S3Server

import tidelog
from tidelog.cli.errors import ExitCode

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
    assert shown.json["logs"] == [{"log": NAME, "catalog": 2, "replica": 1, "lost": 1}]
    assert shown.json["done"] is False
    refused = cli("cluster", "promote", "--store", second)
    assert (refused.code, "Pass --yes" in refused.err) == (ExitCode.BAD_INPUT, True)
    done = cli("cluster", "promote", "--store", second, "--yes", "--json")
    assert (done.code, done.json["first"], done.json["lost"]) == (0, first, 1)
    with tidelog.open(tmp_path / "b", store=second, **quiet) as log:
        assert [message.value for message in log.topic(NAME).read(0)] == [b"in both"]
        assert log.topic(NAME).append(b"goes on", sync=True) == 1

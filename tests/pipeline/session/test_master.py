"""A master is looked at before a Java is started for it."""

from __future__ import annotations

import socket

import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.errors import ConfigError, RetryError
from tidelog.pipeline.session.session import check_master, told_as_settings


@pytest.fixture
def silent_port() -> int:
    """A port of this machine at which nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("master", ["", "bogus", "local[0]", "local[x]", "local[-1]", "http://h", "spark://", "Local"])
def test_a_name_that_is_no_master_is_told_at_once(master: str) -> None:
    """With what it can be, and without starting anything."""
    with pytest.raises(ConfigError, match=r"is not a Spark master.*spark://host:7077"):
        tidelog.spark_session(master=master)


@pytest.mark.parametrize(
    "master", ["local", "local[*]", "local[2]", "local[2, 4]", "local[*,2]", "yarn", "k8s://https://h"]
)
def test_what_spark_understands_is_let_through(master: str) -> None:
    """Also what only Spark can decide."""
    check_master(master)


@pytest.mark.parametrize(
    "master", ["spark://127.0.0.1:{port}", "sc://127.0.0.1:{port}/;user_id=me", "sc://[::1]:{port}"]
)
def test_a_server_that_is_not_there_is_told_at_once(
    master: str, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark itself would try for minutes; behind a proxy it is left to it."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RetryError, match="does not answer"):
        check_master(master.format(port=silent_port))
    monkeypatch.setenv("grpc_proxy", "http://proxy")
    check_master(master.format(port=silent_port))


def test_one_of_several_masters_is_enough(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster may have one to stand in for the other."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_master(f"spark://127.0.0.1:{silent_port},127.0.0.1:{server.getsockname()[1]}")


def test_what_java_refuses_is_about_the_settings(spark: SparkSession) -> None:
    """In one line, and not as an error of Java's."""
    assert spark._jvm is not None
    with pytest.raises(ConfigError, match="Spark did not start: boom"), told_as_settings():
        spark._jvm.java.util.Objects.requireNonNull(None, "boom")

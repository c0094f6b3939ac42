"""`tidelog cluster` without a cluster."""

from __future__ import annotations

import msgspec
import pytest
from tests.cli.conftest import Cli

from tidelog.cli.cluster.group import _node_row
from tidelog.service.cluster_control import ClusterNode, Load, NodeLoad


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no cluster was named"),
        (("--metadata", "http://127.0.0.1:1"), "http://127.0.0.1:1 has no cluster: nodes agree by etcd"),
        (("--metadata", "bucket"), "bucket has no cluster: nodes agree by etcd"),
    ],
)
def test_command_without_etcd_names_the_option(cli: Cli, options: tuple[str, ...], said: str) -> None:
    """Whatever was named instead of etcd, or if nothing was: the way to name it is said."""
    result = cli("cluster", "nodes", *options)
    assert result.code == 2
    assert said in result.err
    assert "--metadata etcd://host:port" in result.err


def test_row_of_a_node_has_its_load_in_both_directions() -> None:
    """Bytes and messages, in and out: those that consumers get were missing."""
    total = Load(bytes_in=1.0, bytes_out=2.0, messages_in=3.0, messages_out=4.0)
    node = ClusterNode(
        name="n1",
        state="alive",
        node_id=1,
        kafka="",
        http="",
        zone="",
        version="",
        is_leader=True,
        partitions=1,
        engines=0,
        slots=1,
        load=NodeLoad(node="n1", at_us=1, total=total),
    )
    row = _node_row(node)
    assert {name: row[name] for name in Load.__struct_fields__} == msgspec.structs.asdict(total)


@pytest.mark.parametrize("words", [("move", "shop/orders", "0", "n3"), ("move-engine", "photos", "n3")])
def test_pin_and_unpin_are_not_asked_for_at_once(cli: Cli, words: tuple[str, ...]) -> None:
    """Both were done, one after the other."""
    result = cli("cluster", *words, "--pin", "--unpin", "--metadata", "etcd://127.0.0.1:1")
    assert result.code == 2
    assert "--pin and --unpin contradict each other" in result.err


@pytest.mark.parametrize("option", ["--store", "--metadata"])
def test_dev_refuses_a_store_of_yours(cli: Cli, option: str) -> None:
    """It was passed over without a word: the command starts its own."""
    result = cli("cluster", "dev", option, "foo")
    assert result.code == 2
    assert f"{option} means nothing here" in result.err


def test_dev_says_where_it_keeps_everything(cli: Cli) -> None:
    """Its --dir has another default than that of the other commands."""
    text = " ".join(cli("cluster", "dev", "--help").out.decode().split())
    assert "a temporary one" in text
    assert "./data" not in text

"""`tidelog cluster` without a cluster."""

from __future__ import annotations

import pytest
from tests.cli.conftest import Cli


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

"""One server a test, and the same log embedded and over the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import cli as cli
from tests.service.http.serving import Served, serving

import tidelog
from tidelog.client.client import Client


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server of a new directory."""
    with serving(tmp_path / "data") as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """A client of it."""
    with tidelog.connect(url_of(served)) as connected:
        yield connected


def url_of(served: Served) -> str:
    return f"http://127.0.0.1:{served.address.port}"

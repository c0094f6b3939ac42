"""What holds for all tests: the same outcome on every machine."""

from __future__ import annotations

import os
import signal

import pytest
from tests.campaign import IS_DEEP, SEED, load_profile
from tests.campaign_plugin import Campaign, mark
from tests.servers import etcd_server, pytest_runtest_makereport, s3_server

__all__ = ["etcd_server", "pytest_runtest_makereport", "s3_server"]

load_profile()

# A shell that starts tests in the background has them ignore Ctrl-C, and whatever they start inherits that: no program
# under test would answer it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees the settings that it makes itself; only the choice of the kernel comes from outside."""
    for name in os.environ:
        if name.startswith("TIDELOG_") and name != "TIDELOG_PURE_PYTHON":
            monkeypatch.delenv(name)


def pytest_configure(config: pytest.Config) -> None:
    """In a campaign the tests have a budget, and an order."""
    if IS_DEEP:
        config.pluginmanager.register(Campaign(config), "campaign")


def pytest_report_header() -> list[str]:
    """A campaign says at its beginning what it takes to repeat it."""
    return [f"CAMPAIGN_SEED={SEED}"] if IS_DEEP else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before markers choose among the tests."""
    mark(items)

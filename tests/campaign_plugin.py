"""The plugin of pytest that runs a campaign: within a budget, and where the last one stopped.

Tests run in the order in which they ran last, those first that failed or never ran. When CAMPAIGN_MINUTES are over, no
other test begins; the end says which did not run. When each test ran last is kept by pytest's cache, and written after
each test: a campaign that is stopped by hand loses nothing.
"""

from __future__ import annotations

import os
import time
from typing import Any

import hypothesis
import pytest
from tests.campaign import SEED

_CACHE_KEY = "tidelog/campaign"
# Fixtures that start a server, or Java.
_SERVERS = {"s3_server", "etcd_server", "spark", "spark_cluster", "spark_connect"}


def mark(items: list[pytest.Item]) -> None:
    """Gives tests the markers that follow from what they are."""
    for item in items:
        if _SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker("server")
        if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj):
            item.add_marker("deeper")


class Campaign:
    """One run; with xdist the controller has one that keeps the books, and each worker has one that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        told = getattr(config, "workerinput", {}).get("campaign")
        self._config = config
        self._is_worker = told is not None
        if told is not None:
            self._last_runs, self._deadline = told
        else:
            self._last_runs = config.cache.get(_CACHE_KEY, {}) if hasattr(config, "cache") else {}
            minutes = os.environ.get("CAMPAIGN_MINUTES")
            self._deadline = time.time() + 60 * float(minutes) if minutes else None
        self._selected: list[str] = []
        self._ran: dict[str, bool] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker gets the same order and the same end."""
        node.workerinput["campaign"] = (dict(self._last_runs), self._deadline)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The one that ran longest ago first."""
        for item in items:
            if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj):
                hypothesis.seed(SEED)(getattr(item.obj, "__func__", item.obj))
        items.sort(key=lambda item: self._last_runs.get(item.nodeid, 0))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected = [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._selected = ids

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """After the end of the budget a test counts as handled, without a report."""
        return True if self._deadline is not None and time.time() > self._deadline else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What failed comes first the next time, as what never ran does."""
        if self._is_worker:
            return
        self._ran[report.nodeid] = self._ran.get(report.nodeid, True) and not report.failed
        if report.when == "teardown":
            self._last_runs[report.nodeid] = time.time() if self._ran[report.nodeid] else 0
            if hasattr(self._config, "cache"):
                self._config.cache.set(_CACHE_KEY, self._last_runs)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        missing = [test for test in self._selected if test not in self._ran]
        terminalreporter.section("campaign")
        terminalreporter.line(f"to make the same choices again: CAMPAIGN_SEED={SEED}")
        if missing:
            count = f"{len(missing)} of {len(self._selected)} tests"
            terminalreporter.line(f"{count} did not run in the time that there was; the next run begins with them:")
            for test in missing:
                terminalreporter.line(f"  {test}")

"""One Chromium a process. Where there is none, these tests are not collected, and the report says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.chromium import Chromium, Page, chromium, executable
from tests.service.http.serving import Served, serving

import tidelog

if executable() is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    """Why the tests of the console are missing."""
    return None if executable() else "tests/browser: left out, Chromium is not installed (apt-get install chromium)"


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """A browser with an empty profile."""
    with chromium() as running:
        yield running


def seed(place: Path) -> None:
    """A directory whose topics have messages in the store only, on the disk, and not shipped; and an engine.

    Of `shop/orders` 0 to 69 or so are in the store only, and 80 to 89 on the disk only. The store has one object that
    no message needs.
    """
    store = place / "store"
    with tidelog.open(place / "data", store=store.as_uri(), metadata="bucket", rotate_max_bytes=2048) as log:
        orders = log.topic("shop/orders", local_retention_bytes=1)
        for start in (0, 40):
            for number in range(start, start + 40):
                orders.append(order(number), key=b"customer-%d" % (number % 7), headers={"source": b"web"})
            orders.ship()
            orders.prune()
        for number in range(80, 90):
            orders.append(order(number), key=b"customer-%d" % (number % 7))
        orders.flush()
        with orders.subscribe("billing", "shared") as billing:
            for _ in range(20):
                message = billing.receive(timeout=60)
                assert message is not None
                billing.ack(message)
        clicks = log.topic("shop/clicks", partitions=3)
        for number in range(12):
            clicks.append(b"click %d" % number, key=b"u%d" % number)
        log.topic("audit/empty")
    first = next(store.rglob("data-0-39-e1.tlog"))
    shutil.copy(first, first.with_name("data-0-39-e0.tlog"))
    with tidelog.open_engine(place / "engine") as engine:
        engine.apply(1, tidelog.CreateBucket("photos"))
        for seq in range(2, 42):
            engine.apply(seq, tidelog.PutObject("photos", f"cat-{seq % 4}", b"version %d" % seq))
        engine.apply(42, tidelog.DeleteObject("photos", "cat-1"))
        engine.update_low_water_mark(36)


def order(number: int) -> bytes:
    """A message that looks like one."""
    return json.dumps({"order": number, "total": number * 1.5, "items": [{"sku": "A-17", "quantity": 2}]}).encode()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server of the topics and the engine above."""
    seed(tmp_path)
    with serving(tmp_path / "data", store=(tmp_path / "store").as_uri(), engine=tmp_path / "engine") as running:
        yield running


@pytest.fixture
def page(browser: Chromium, served: Served) -> Iterator[Page]:
    """The console; at the end no script has failed, and the policy has blocked nothing."""
    with browser.page(f"http://127.0.0.1:{served.address.port}/") as opened:
        yield opened
        assert opened.complaints() == []

"""The page of `tidelog pipeline report`: right numbers, one file, and nothing that foreign text could break."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tidelog.cli.app import run
from tidelog.config import load_settings
from tidelog.errors import NotFoundError
from tidelog.pipeline.address import find_root
from tidelog.pipeline.report.figures import (
    Stretch,
    SubscriptionFigures,
    TimeBins,
    TopicFigures,
    choose_bins,
    gather_figures,
    spread,
)
from tidelog.pipeline.report.page import Column, Page, axis_top, bar_chart, byte_text, count_text, escaped, page_html
from tidelog.pipeline.report.report import make_report
from tidelog.testing import ManualClock
from tidelog.wiring import open_directory

HOUR_US = 3_600_000_000
NEW_YEAR_US = 1_767_225_600_000_000
HOSTILE = "</title><script>alert(1)</script>\"'&<img src=x onerror=y>\x00\x1b\u202e"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with a store and two topics, one of which is partly shipped, over ten hours."""
    clock = ManualClock(NEW_YEAR_US)
    directory, store = tmp_path / "data", (tmp_path / "store").as_uri()
    settings = load_settings(None, {}, {"dir": directory, "store": store, "metadata": "bucket"})
    with open_directory(directory, settings, clock=clock, runs_in_background=False) as log:
        orders, clicks = log.topic("shop/orders"), log.topic("web/clicks")
        for hour in range(10):
            orders.append_many([b"order"] * 10)
            clicks.append(b"click", key=b"k")
            if hour == 4:
                orders.ship()
            clock.advance(3600)
        with orders.subscribe("billing") as consumer:
            for _ in range(30):
                message = consumer.receive(timeout=120)
                assert message is not None
                consumer.ack(message)
    return directory


def stretch(start: int, count: int, first_us: int | None, last_us: int | None, size: int = 1000) -> Stretch:
    """Some messages."""
    return Stretch(
        start_offset=start,
        next_offset=start + count,
        size=size,
        raw_bytes=size,
        first_time_us=first_us,
        last_time_us=last_us,
    )


def page_of(*topics: TopicFigures, max_details: int = 100) -> str:
    """A page of these topics."""
    bins = choose_bins(topics)
    times = [] if bins is None else [spread(topic, bins) for topic in topics]
    return page_html(
        Page(
            root=HOSTILE,
            made_us=NEW_YEAR_US,
            topics=topics,
            bins=bins,
            times=times,
            is_exact=False,
            max_details=max_details,
        )
    )


def elements(page: str) -> Iterator[ElementTree.Element]:
    """All elements of a page, which must be well-formed."""
    return ElementTree.fromstring(page).iter()


def texts(page: str) -> str:
    """All that can be read on a page."""
    return " ".join(ElementTree.fromstring(page).itertext())


def test_the_figures_of_a_topic_are_those_of_its_catalog_and_files(root: Path) -> None:
    """Objects, files, what is not shipped, and how far subscriptions are."""
    (orders,) = gather_figures(find_root(root), ["shop/orders"])
    assert (orders.start_offset, orders.shipped_offset, orders.next_offset) == (0, 50, 100)
    assert [(one.start_offset, one.next_offset) for one in orders.objects] == [(0, 50)]
    assert orders.unshipped_messages == 50
    assert orders.messages == 100
    assert orders.kept_messages == (0, 50, 50)
    (billing,) = orders.subscriptions
    assert (billing.name, billing.offset, billing.lag_messages) == ("billing", 30, 70)


def test_offsets_on_the_page_are_those_of_proofs() -> None:
    """Both ends belong to the topic, as in the proof of `verify`; a topic without messages has none."""
    page = page_of(TopicFigures(name="a/b", start_offset=3, next_offset=5), TopicFigures(name="a/empty"))
    assert re.findall(r"\b\d+ to \d+\b", texts(page)) == ["3 to 4"]


def test_messages_are_counted_once_over_time(root: Path) -> None:
    """What is in an object and in a file counts as cold, what is only in a file as hot, and nothing is lost."""
    (orders,) = gather_figures(find_root(root), ["shop/orders"])
    bins = choose_bins([orders])
    assert bins is not None
    counts = spread(orders, bins)
    assert sum(counts.cold_messages) == pytest.approx(50)
    assert sum(counts.hot_messages) == pytest.approx(50)


def test_a_topic_that_cannot_be_read_is_on_the_page_with_its_problem(root: Path, tmp_path: Path) -> None:
    """One broken topic does not keep the others from being shown, and the report is not good."""
    files = sorted((root / "web" / "clicks").glob("wal.*.log"))
    (root / "web" / "clicks" / "wal.ckpt").unlink()
    files[0].write_bytes(b"\x01" * 40 + files[0].read_bytes()[40:])
    report = make_report(find_root(root), tmp_path / "page.html")
    assert [problem.subject for problem in report.findings] == ["web/clicks"]
    assert not report.is_good
    assert report.messages == 100
    assert "shop/orders" in texts((tmp_path / "page.html").read_text("utf-8"))


def test_the_page_is_one_file_without_scripts() -> None:
    """It asks for nothing from elsewhere, and its own policy would forbid it."""
    page = page_of(TopicFigures(name="a/b", next_offset=5, files=(stretch(0, 5, NEW_YEAR_US, NEW_YEAR_US),)))
    names = {element.tag.rpartition("}")[2] for element in elements(page)}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not {
        name for element in elements(page) for name in element.attrib if name in ("src", "href") or name[:2] == "on"
    }
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in ElementTree.fromstring(page)[0][1].attrib["content"]
    assert "prefers-color-scheme: dark" in page


def test_hostile_text_stays_text() -> None:
    """Names, problems and places cannot end an element, add one, or hold characters that no page may have."""
    topic = TopicFigures(
        name=HOSTILE,
        next_offset=5,
        files=(stretch(0, 5, NEW_YEAR_US, NEW_YEAR_US),),
        subscriptions=(SubscriptionFigures(name=HOSTILE, kind=HOSTILE, offset=0, lag_messages=5, moved_us=1 << 62),),
    )
    page = page_of(topic, TopicFigures(name=HOSTILE, problem=HOSTILE))
    assert {element.tag.rpartition("}")[2] for element in elements(page)}.isdisjoint({"script", "img"})
    assert "<script>alert(1)" in texts(page)
    assert not set("\x00\x1b\u202e") & set(page)
    assert escaped(HOSTILE).count("<") == 0


@pytest.mark.parametrize("count", [0, 1, 500])
def test_any_number_of_topics_makes_a_page(count: int) -> None:
    """Every topic has its row; only the largest have charts of their own."""
    topics = [
        TopicFigures(
            name=f"shop/topic-{number}",
            next_offset=10,
            files=(stretch(0, 10, NEW_YEAR_US, NEW_YEAR_US + number * HOUR_US, size=number + 1),),
        )
        for number in range(count)
    ]
    page = page_of(*topics, max_details=20)
    found = [element.tag.rpartition("}")[2] for element in elements(page)]
    assert found.count("tr") == (count + 1 + 3 * (count > 0) + 3 * min(count, 20) * (count > 1) if count else 0)
    assert found.count("details") == (20 if count == 500 else 0)
    assert ("There are no topics here." in page) == (count == 0)


def test_times_are_spread_over_the_bins_that_they_touch() -> None:
    """An object of two hours gives each hour its share."""
    bins = TimeBins(NEW_YEAR_US, HOUR_US, 3)
    topic = TopicFigures(
        name="a/b",
        next_offset=90,
        shipped_offset=60,
        objects=(stretch(0, 60, NEW_YEAR_US + HOUR_US // 2, NEW_YEAR_US + 2 * HOUR_US - 1),),
        files=(stretch(30, 60, NEW_YEAR_US + 2 * HOUR_US, NEW_YEAR_US + 2 * HOUR_US),),
    )
    counts = spread(topic, bins)
    assert counts.cold_messages == pytest.approx([20, 40, 0])
    assert counts.hot_messages == pytest.approx([0, 0, 30])
    assert sum(counts.hot_bytes) == pytest.approx(500)


@pytest.mark.parametrize("last_us", [NEW_YEAR_US, NEW_YEAR_US + 90 * HOUR_US, NEW_YEAR_US * 5, (1 << 63) - 1])
def test_there_are_few_bins_whatever_the_times_are(last_us: int) -> None:
    """A wrong clock makes wide bins, not many."""
    topic = TopicFigures(name="a/b", objects=(stretch(0, 1, -NEW_YEAR_US, last_us), stretch(1, 1, None, None)))
    bins = choose_bins([topic])
    assert bins is not None
    assert 1 <= bins.count <= 60
    assert bins.bounds_us(0)[0] <= -NEW_YEAR_US
    assert bins.bounds_us(bins.count - 1)[1] > last_us
    assert "<svg" in page_of(topic)


def test_axes_end_in_round_numbers() -> None:
    """Counts in tens, bytes in units of 1024, never below the largest value."""
    assert [axis_top(value) for value in (0, 3, 7, 107, 950)] == [4, 4, 8, 120, 1000]
    assert byte_text(axis_top(477 * 1024, 1024)) == "600 KiB"
    assert (count_text(1500), count_text(999), byte_text(1536)) == ("1.5k", "999", "1.5 KiB")
    assert bar_chart("x", [Column(0, 0, "none", "none")], count_text).count('class="cold"') == 0


def test_the_command_writes_the_page_without_spark(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tidelog pipeline report` is quick, says what is on the page, and replaces it as a whole."""
    page = tmp_path / "page.html"
    assert run(["pipeline", "report", "--root", str(root), "--to", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["topics"], told["messages"], told["unshipped_messages"]) == (2, 110, 60)
    assert told["page_bytes"] == page.stat().st_size
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_topic_that_is_not_there_is_named(root: Path, tmp_path: Path) -> None:
    """Nothing is written then."""
    with pytest.raises(NotFoundError, match="shop/nothing"):
        make_report(find_root(root), tmp_path / "page.html", ["shop/nothing"])
    assert not (tmp_path / "page.html").exists()


def test_spark_counts_every_message_over_time(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    """With `exact` the bins have whole numbers of messages, and the same sums; workers look at the topics."""
    report = make_report(find_root(root), tmp_path / "page.html", spark=spark, exact=True)
    page = texts((tmp_path / "page.html").read_text("utf-8"))
    assert report.is_good
    assert report.messages == 110
    assert page.count("2026-01-01 03:00:00 to 2026-01-01 03:10:00: 11 messages") == 1
    assert page.count("2026-01-01 08:00:00 to 2026-01-01 08:10:00: 11 messages, 11 messages of it") == 1

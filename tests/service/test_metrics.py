"""Metrics: the text is what Prometheus reads, the figures are true, and dashboards name what exists."""

from __future__ import annotations

import json
import re
import socket
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import promql_parser
import pytest
from tests.engine.replica_group import Replica, settings_of
from tests.engine.stations import EngineNode, new_store
from tests.service.http.serving import WAIT_SECONDS, Served, serving
from tests.service.http.test_subscriptions import subscribe

from tidelog.clock import ManualClock, Stopwatch
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.service.kafka.codec import encode_request, wire
from tidelog.service.metrics import FAMILIES, Exposition, Sum, label_text, write_engine, write_groups

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
LABEL = r'[a-z_]+="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"([a-z_]+)(\{{{LABEL}(?:,{LABEL})*\}})? (-?[0-9.e+-]+|\+Inf)")
NAME = re.compile(r"\btidelog_[a-z_]+")
PARTS = ("_bucket", "_sum", "_count")


def family_of(name: str) -> str:
    """The family of a sample: those of a histogram have endings."""
    if name in FAMILIES:
        return name
    return next((name.removesuffix(part) for part in PARTS if name.endswith(part)), name)


def parsed(text: str) -> dict[str, dict[str, float]]:
    """The samples by name and labels; every line has to be one that Prometheus reads."""
    samples: defaultdict[str, dict[str, float]] = defaultdict(dict)
    current = ""
    seen: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert current not in seen, f"{current} is declared twice"
            seen.add(current)
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2:] == [current, FAMILIES[current].kind]
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert family_of(match[1]) == current, line
            assert (match[2] or "") not in samples[match[1]], line
            samples[match[1]][match[2] or ""] = float(match[3])
    return samples


def scraped(served: Served) -> dict[str, dict[str, float]]:
    answer = served.call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(answer.body.decode())


def test_scrape_tells_of_topics_subscriptions_and_requests(tmp_path: Path) -> None:
    """Offsets, lag, histograms and requests are those of what happened."""
    with serving(tmp_path / "data", store=(tmp_path / "store").as_uri(), engine=tmp_path / "engine") as served:
        served.produce("shop/orders", *"abc")
        consumer = subscribe(served)
        served.ok("POST", f"{consumer}/receive?limit=2")
        served.ok("POST", f"{consumer}/ack", {"messages": [[0, 0]]})
        served.ok("POST", "/v1/topics/shop/orders/ship?wait=60")
        served.ok("GET", "/v1/topics/shop/orders/messages")
        found = scraped(served)
    where = '{topic="shop/orders",partition="0"}'
    assert found["tidelog_partition_next_offset"][where] == 3
    assert found["tidelog_partition_failed"][where] == 0
    sub = '{topic="shop/orders",partition="0",subscription="billing"}'
    assert found["tidelog_subscription_lag_messages"][sub] == 2
    assert found["tidelog_subscription_acked_total"][sub] == 1
    route = '{route="POST /v1/topics/{namespace}/{name}/messages",status="200"}'
    assert found["tidelog_http_requests_total"][route] == 1
    assert found["tidelog_fsync_seconds_count"][""] >= 1
    assert found["tidelog_engine_applied_seq"]['{engine="main"}'] == 0
    assert found["tidelog_partition_epoch"][where] >= 1
    assert found["tidelog_http_consumers"][""] == 1
    assert found["tidelog_topics"][""] == 1


def test_requests_of_kafka_are_timed_by_api(tmp_path: Path) -> None:
    """A client of Kafka shows in connections, bytes and times."""
    with serving(tmp_path / "data") as served:
        ask_kafka(served)


def ask_kafka(served: Served) -> None:
    before = scraped(served)
    assert "tidelog_kafka_request_seconds_count" not in before
    port = served.in_loop(lambda: served.node._broker.address.port)
    with closing(socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS)) as client:
        client.sendall(bytes(encode_request(18, 0, 1, "test", wire(18).ApiVersionsRequest())))
        size = int.from_bytes(client.recv(4), "big")
        assert size > 0
        found = scraped(served)
    assert found["tidelog_kafka_request_seconds_count"]['{api="ApiVersions"}'] == 1
    assert found["tidelog_kafka_received_bytes_total"][""] > 0
    assert found["tidelog_kafka_sent_bytes_total"][""] >= size


def test_histogram_is_cumulative() -> None:
    """Every bucket has what the ones before it have; the last one has all."""
    watch = Stopwatch()
    for seconds in (0.000_001, 0.001, 0.002, 1.0, 500.0):
        watch.add(seconds)
    exposition = Exposition()
    exposition.add_histogram("tidelog_fsync_seconds", watch.snapshot())
    found = parsed(exposition.text().decode())
    buckets = list(found["tidelog_fsync_seconds_bucket"].values())
    assert buckets == sorted(buckets)
    assert (buckets[0], buckets[-2], buckets[-1]) == (1, 4, 5)
    assert found["tidelog_fsync_seconds_count"][""] == 5
    assert found["tidelog_fsync_seconds_sum"][""] == pytest.approx(501.003_001)


def test_sums_add_up_all_partitions() -> None:
    """The histogram of all partitions has each of their times."""
    one, other = Stopwatch(), Stopwatch()
    one.add(0.001)
    other.add(0.1)
    other.add(0.001)
    gathered = Sum()
    for watch in (one, other):
        gathered.add(watch.snapshot())
    both = gathered.histogram()
    assert both.count == 3
    assert both.total_seconds == pytest.approx(0.102)


def test_labels_are_escaped() -> None:
    """A name that a client chose breaks no line."""
    exposition = Exposition()
    write_groups(exposition, {'a"b\\c\nd': {("shop/orders", 0): 3}}, {("shop/orders", 0): 10})
    found = parsed(exposition.text().decode())
    labels = label_text(("group", 'a"b\\c\nd'), ("topic", "shop/orders"), ("partition", "0"))
    assert found["tidelog_group_lag_messages"] == {labels: 7}
    assert found["tidelog_group_committed_offset"] == {labels: 3}


def test_group_without_an_open_partition_has_no_lag() -> None:
    """What is not known is left out, not guessed."""
    exposition = Exposition()
    write_groups(exposition, {"g": {("shop/orders", 0): 3}}, {})
    assert "tidelog_group_lag_messages" not in parsed(exposition.text().decode())


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.*")), ids=lambda path: path.name)
def test_deployed_files_name_metrics_that_exist(path: Path) -> None:
    """A dashboard or an alert of a metric that nobody writes would be silent for ever."""
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        json.loads(text)
    unknown = {name for name in NAME.findall(text) if family_of(name) not in FAMILIES}
    assert unknown == set()


def expressions() -> dict[str, str]:
    """The expressions of dashboard and alerts, with Grafana's variables as it fills them in."""
    dashboard = json.loads((DEPLOY / "grafana" / "tidelog.json").read_text("utf-8"))
    found = {
        f"{panel['title']} {number}": target["expr"]
        for panel in dashboard["panels"]
        for number, target in enumerate(panel.get("targets", ()))
    }
    alerts = (DEPLOY / "prometheus" / "alerts.yml").read_text("utf-8")
    found |= dict(re.findall(r"- alert: (\w+)\n +expr: (.*)", alerts))
    assert len(found) > 40
    filled = (("$instance", ".*"), ("$topic", ".*"), ("$__rate_interval", "1m"))
    for name, text in found.items():
        for variable, value in filled:
            text = text.replace(variable, value)  # noqa: PLW2901
        found[name] = text
    return found


def test_expressions_of_dashboard_and_alerts_parse() -> None:
    """Prometheus refuses a whole file for one wrong expression, and Grafana shows an empty panel."""
    wrong = {}
    for name, text in expressions().items():
        try:
            promql_parser.parse(text)
        except ValueError as error:
            wrong[name] = f"{text}: {error}"
    assert wrong == {}
    with pytest.raises(ValueError, match="rate"):
        promql_parser.parse("rate(tidelog_reads_total)")


def test_dashboard_and_alerts_are_there() -> None:
    """Both have something to say of every side."""
    for name in ("grafana/tidelog.json", "prometheus/alerts.yml"):
        names = {family_of(found) for found in NAME.findall((DEPLOY / name).read_text("utf-8"))}
        sides = {found.split("_")[1] for found in names}
        assert {"partition", "subscription", "group", "http", "engine", "cold"} <= sides


def test_engine_that_follows_another_has_what_its_cold_reads_cost() -> None:
    """It ships nothing, and reads as its owner does."""
    store, clock = new_store(), ManualClock()
    owner, follower = (Replica(store, name=name, clock=clock, **settings_of()).open_shared() for name in "ab")
    for one in (owner, follower):
        one.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "cold", b"c" * 500))])
        one.apply_these([(3, PutObject("b", "k", b"x" * 20_000))])
        one.engine.update_low_water_mark(3)
        one.engine.create_checkpoint()
        one.engine.ship()
    assert [follower.engine.read("b", "cold").tier for _ in range(3)] == ["cold", "cold", "hot"]
    exposition = Exposition()
    write_engine(exposition, "main", follower.engine.statistics())
    value = {name: samples.get('{engine="main"}') for name, samples in parsed(exposition.text().decode()).items()}
    assert value["tidelog_engine_cold_read_seconds_count"] == 2
    assert value["tidelog_engine_cold_used_bytes_total"] == 1008
    assert value["tidelog_engine_disk_cache_admitted_total"] == 1
    assert "tidelog_engine_unshipped_bytes" not in value
    for one in (owner, follower):
        one.close()


def test_engine_has_histograms_and_what_its_cold_reads_cost() -> None:
    """Applies, syncs, hot and cold reads by time; bytes fetched against bytes used; what waits for the orchestrator is
    apart from what waits for the store.
    """
    with EngineNode(new_store(), inline_value_bytes=0, local_retention_bytes=0).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "cold", b"c" * 500))])
        node.apply_these([(3, PutObject("b", "k", b"x" * 20_000))])
        node.ship_all()
        node.engine.create_checkpoint()
        node.ship_all()
        node.apply_these([(4, PutObject("b", "hot", b"h"))])
        node.clock.advance(7)
        assert [node.engine.read("b", "cold").tier for _ in range(4)] == ["cold", "cold", "hot", "hot"]
        for _ in range(64):
            node.engine.read("b", "hot")
        exposition = Exposition()
        write_engine(exposition, "main", node.engine.statistics())
    found = parsed(exposition.text().decode())
    value = {name: samples.get('{engine="main"}') for name, samples in found.items()}
    assert value["tidelog_engine_uncommitted_seconds"] == 7
    assert value["tidelog_engine_unshipped_seconds"] == 0
    assert value["tidelog_engine_apply_seconds_count"] == 3
    assert (value["tidelog_engine_fsync_seconds_count"] or 0) >= 3
    assert value["tidelog_engine_hot_read_seconds_count"] == 1
    assert value["tidelog_engine_cold_read_seconds_count"] == 2
    assert value["tidelog_engine_cold_fetched_bytes_total"] == 504
    assert value["tidelog_engine_cold_used_bytes_total"] == 1008
    assert (value["tidelog_engine_disk_cache_admitted_total"], value["tidelog_engine_disk_cache_hits_total"]) == (1, 2)
    assert '{engine="main",le="1e-06"}' in found["tidelog_engine_hot_read_seconds_bucket"]

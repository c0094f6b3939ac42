"""The store and the catalog fail under a topic that is being written and shipped: real servers, killed, stopped, full.

Whatever happened, once it is over: everything is in the store exactly once, byte for byte as it is on the disk, and
nothing else is there after a sweep. Appends never wait for the store.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from tests.fault_proxy import FAULTS, STALL, FaultProxy
from tests.log.workbench import python, python_environment, wait_until, wal_paths
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, EtcdServer, S3Server

import tidelog
from tidelog.cli import dev_s3
from tidelog.cold import owned_log as wakefulness
from tidelog.cold.owned_log import pulse
from tidelog.cold.settings import ShipperStatistics
from tidelog.log.binding import BINDING_BYTES
from tidelog.topics.directory import LogDirectory

NAME = "shop/orders"
MIB = 1 << 20
# A request hangs for ten minutes: who ends within this has not waited for one.
HANGING_MS = 600_000
CLOSE_SECONDS = 240
QUICK_FAULTS = tuple(fault for fault in FAULTS if fault != STALL)
# Much is uploaded often: objects of several parts, and small ones in between.
SETTINGS = {
    "fsync_interval_ms": 50,
    "rotate_max_bytes": 20 * MIB,
    "max_object_bytes": 24 * MIB,
    "ship_interval_seconds": 0.05,
    "ship_min_bytes": 1,
    "ship_max_delay_seconds": 0,
    "ship_retry_max_seconds": 0.3,
    "store_connect_timeout_ms": 500,
    "store_request_timeout_ms": 2000,
    "store_max_retries": 1,
    "store_retry_timeout_seconds": 3,
}


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process may take itself for one that slept: its next append asks who owns the topic."""
    monkeypatch.setattr(wakefulness, "_PATIENCE_SECONDS", 0.2)


class Place:
    """A store and a metadata store, reached through `endpoint`."""

    def __init__(self, server: S3Server, prefix: str, metadata: str, endpoint: str | None = None) -> None:
        self.server = server
        self.url = server.url(prefix)
        self.metadata = metadata
        self.root = prefix  # one etcd knows the topics of several stores
        self.endpoint = endpoint or server.endpoint

    def open(self, directory: Path, *, read_only: bool = False, **changes: Any) -> LogDirectory:
        keys = {"store_access_key_id": ACCESS_KEY_ID, "store_secret_access_key": SECRET_ACCESS_KEY}
        settings: dict[str, Any] = {
            **SETTINGS,
            "store_endpoint": self.endpoint,
            "metadata_root": self.root,
            **keys,
            **changes,
        }
        return tidelog.open(directory, store=self.url, metadata=self.metadata, read_only=read_only, **settings)


class Feeder:
    """Appends without much of a pause until it is stopped."""

    def __init__(self, topic: tidelog.Topic, seed: int = 1) -> None:
        self.appended = 0
        self._topic = topic
        self._random = random.Random(seed)
        self._is_over = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(0.01):
            value = self._random.randbytes(self._random.choice((10, 1000, 100_000)))
            self._topic.append(value)
            self.appended += 1

    def goes_on(self) -> None:
        """Waits until it has appended some more: nobody waits for the store then."""
        before = self.appended
        wait_until(lambda: self.appended > before + 3, "appends that do not wait for the store")

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def fed_topic(place: Place, directory: Path, **changes: Any) -> Iterator[tuple[tidelog.Topic, Feeder]]:
    """A topic that is appended to and shipped while the body of the `with` runs; afterwards everything is checked."""
    with place.open(directory, **changes) as log:
        topic = log.topic(NAME)
        feeder = Feeder(topic)
        try:
            wait_until(lambda: topic.shipped_offset > 0, "the first object")
            yield topic, feeder
        finally:
            feeder.stop()
        check_healed(place, topic, directory)


def check_healed(place: Place, topic: tidelog.Topic, directory: Path) -> None:
    """Everything is shipped by itself, once, as it is on the disk; nothing else is there after a sweep."""
    topic.flush()
    wait_until(lambda: topic.shipped_offset == topic.next_offset, "everything to be shipped")
    topic.remove_orphans(topic.plan_orphans())
    assert topic.plan_orphans().is_empty
    local = b"".join(path.read_bytes()[BINDING_BYTES:] for path in wal_paths(directory / NAME))
    with place.open(directory / "reader", read_only=True) as log:
        assert log._tier is not None
        catalog, objects = log._tier.catalog("shop", "orders"), log._tier.objects
        descriptors = list(catalog.walk(0))
        starts = [0, *(one.next_offset for one in descriptors)]
        assert [one.start_offset for one in descriptors] == starts[:-1]
        assert starts[-1] == topic.next_offset
        keys = [catalog.keys.object(one.name) for one in descriptors]
        assert sorted(info.key for info in objects.list(catalog.keys.objects_prefix)) == sorted(keys)
        if all(one.codec == "none" for one in descriptors):
            assert b"".join(bytes(objects.get(key).data)[BINDING_BYTES:] for key in keys) == local
        history = list(log.topic(NAME).read())
    assert history == list(topic.read())
    assert [message.offset for message in history] == list(range(topic.next_offset))


def shipper_of(topic: tidelog.Topic) -> ShipperStatistics:
    """Where its shipper is."""
    tier = topic.statistics().tier
    assert tier is not None
    assert tier.shipper is not None
    return tier.shipper


def uploading_parts(topic: tidelog.Topic) -> None:
    """Waits until an object of several parts is on its way."""
    topic.append_many([random.Random(number).randbytes(MIB) for number in range(12)])
    wait_until(lambda: shipper_of(topic).uploading_raw_bytes > 8 * MIB, "an upload of several parts")


def failed_more(topic: tidelog.Topic) -> None:
    """Waits until shipping has failed once more."""
    before = shipper_of(topic).errors
    wait_until(lambda: shipper_of(topic).errors > before, "an attempt that failed")


@pytest.mark.parametrize("metadata", ["bucket", pytest.param("sqlite", marks=pytest.mark.long)])
def test_server_is_killed_in_the_middle_of_uploads(s3_server: S3Server, tmp_path: Path, metadata: str) -> None:
    """A SeaweedFS that is killed while it is sent objects, and comes back, has everything once."""
    url = metadata if metadata == "bucket" else f"sqlite:///{tmp_path}/metadata.db"
    with fed_topic(Place(s3_server, f"killed-{metadata}", url), tmp_path) as (topic, feeder):
        uploading_parts(topic)
        s3_server.kill()
        failed_more(topic)
        feeder.goes_on()
        s3_server.start()


def test_server_that_does_not_answer(s3_server: S3Server, tmp_path: Path) -> None:
    """A SeaweedFS that is stopped while it is sent objects lets requests time out; all is well when it wakes up."""
    place = Place(s3_server, "paused", "bucket")
    with fed_topic(place, tmp_path, ship_compression="zstd") as (topic, feeder):
        uploading_parts(topic)
        s3_server.pause()
        try:
            pulse.sleeps += 1  # as if this process had been stopped as well
            failed_more(topic)
            feeder.goes_on()
        finally:
            s3_server.resume()


def test_bad_network(s3_server: S3Server, tmp_path: Path) -> None:
    """503, 507, resets, bodies cut short, lost answers and silence: what was undecided is settled, nothing twice."""
    with (
        FaultProxy(s3_server.endpoint) as proxy,
        fed_topic(Place(s3_server, "network", "bucket", proxy.endpoint), tmp_path) as (topic, _),
    ):
        proxy.misbehave(*FAULTS, every=4)
        uploading_parts(topic)
        wait_until(lambda: set(proxy.met) == set(FAULTS), "every fault")
        proxy.heal()


def test_history_is_read_through_a_bad_network(s3_server: S3Server, tmp_path: Path) -> None:
    """A reader gets the right bytes or an error that says to try again, never fewer bytes or others."""
    with FaultProxy(s3_server.endpoint) as proxy:
        place = Place(s3_server, "read", "bucket", proxy.endpoint)
        with place.open(tmp_path / "writer", store_request_timeout_ms=30_000) as log:
            topic = log.topic(NAME)
            topic.append_many([random.Random(number).randbytes(100_000) for number in range(200)])
            topic.ship()
            expected = list(topic.read())
        with place.open(tmp_path / "reader", read_only=True, store_request_timeout_ms=30_000) as log:
            topic = log.topic(NAME)
            proxy.misbehave(*QUICK_FAULTS, every=3)
            found = list[tidelog.Message]()
            for _ in range(200):
                try:
                    found.extend(topic.read(len(found), len(expected)))
                    break
                except tidelog.RetryError:
                    continue
            assert found == expected
            assert proxy.met.total() > 5


def test_store_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SeaweedFS without room refuses objects; when it has room again, all that waited goes there."""
    flags = tuple(flag for flag in dev_s3._FLAGS if "volume.max" not in flag and "SizeLimit" not in flag)
    monkeypatch.setattr(dev_s3, "_FLAGS", (*flags, "-volume.max=2", "-master.volumeSizeLimitMB=1"))
    server = S3Server(tmp_path)
    server.begin()
    try:
        with fed_topic(Place(server, "full", f"sqlite:///{tmp_path}/metadata.db"), tmp_path / "log") as (topic, _):
            uploading_parts(topic)
            failed_more(topic)
            server.kill()
            monkeypatch.setattr(dev_s3, "_FLAGS", (*flags, "-volume.max=100", "-master.volumeSizeLimitMB=64"))
            server.start()
    finally:
        server.kill()


def test_catalog_is_killed(s3_server: S3Server, etcd_server: EtcdServer, tmp_path: Path) -> None:
    """An etcd that is killed between upload and publishing, and comes back, knows every object once."""
    with fed_topic(Place(s3_server, "etcd", etcd_server.url), tmp_path) as (topic, feeder):
        uploading_parts(topic)
        etcd_server.kill()
        failed_more(topic)
        feeder.goes_on()
        etcd_server.start()


def test_catalog_behind_a_bad_network(s3_server: S3Server, etcd_server: EtcdServer, tmp_path: Path) -> None:
    """What etcd was asked and did not answer is settled before it is asked again: every object is published once."""
    with FaultProxy(etcd_server.url.replace("etcd:", "http:")) as proxy:
        place = Place(s3_server, "etcd-network", proxy.endpoint.replace("http:", "etcd:"))
        with fed_topic(place, tmp_path):
            proxy.misbehave(*QUICK_FAULTS, every=3)
            wait_until(lambda: set(proxy.met) == set(QUICK_FAULTS), "every fault")
            proxy.heal()


def test_open_topics_are_at_hand_while_another_is_being_opened(s3_server: S3Server, tmp_path: Path) -> None:
    """Whoever asks for a topic that is open gets it at once, although opening another one hangs in the store."""
    with (
        FaultProxy(s3_server.endpoint) as proxy,
        Place(s3_server, "open", "bucket", proxy.endpoint).open(tmp_path) as log,
    ):
        topic = log.topic(NAME)
        proxy.misbehave(STALL)
        opening = Thread(target=log.topic, args=("shop/returns",))
        opening.start()
        wait_until(lambda: proxy.met[STALL] > 0, "the store to be asked")
        assert log.topic(NAME) is topic
        assert opening.is_alive()
        proxy.heal()
        opening.join()
        assert log.topics() == [NAME, "shop/returns"]


# Requests that hang do so for ten minutes, and the patience of whoever closes is short. Somebody reads at the end.
CLOSING = """
import sys, threading, time, tidelog
from tidelog.store import scheduler as background
background._PATIENCE_SECONDS = 0.5
directory, url, endpoint, hanging_ms = sys.argv[1:]
place = {"store": url, "metadata": "bucket", "metadata_root": "closing", "store_endpoint": endpoint,
    "store_request_timeout_ms": int(hanging_ms), "store_retry_timeout_seconds": int(hanging_ms) // 1000}
log = tidelog.open(directory, ship_interval_seconds=0.05, ship_min_bytes=1, ship_max_delay_seconds=0,
    fsync_interval_ms=20, ownership_check_seconds=0.2, **place)
topics = [log.topic(f"shop/orders-{number}") for number in range(5)]
topics[0].append_many([bytes(100_000)] * 160)
topics[0].ship()
reader = tidelog.open(directory + "-reader", read_only=True, **place)
messages = reader.topic("shop/orders-0").read()
next(messages)
print("open", flush=True)
sys.stdin.readline()
threading.Thread(target=list, args=(messages,), daemon=True).start()
for topic in topics[:3]:
    topic.append_many([bytes(1000)] * 1000, sync=True)
time.sleep(0.5)
log.close()
reader.close()
"""


def test_closing_during_an_outage_takes_seconds(s3_server: S3Server, tmp_path: Path) -> None:
    """A process with several topics whose store has stopped to answer closes and ends without it, losing nothing."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY}
    with FaultProxy(s3_server.endpoint) as proxy:
        child = subprocess.Popen(
            python(CLOSING, tmp_path / "log", s3_server.url("closing"), proxy.endpoint, str(HANGING_MS)),
            env=python_environment() | keys,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        proxy.misbehave(STALL)
        child.communicate(b"\n", timeout=CLOSE_SECONDS)
        assert child.returncode == 0
        proxy.heal()
        with Place(s3_server, "closing", "bucket").open(tmp_path / "log") as log:
            ends = [log.topic(f"shop/orders-{number}").next_offset for number in range(5)]
            assert ends == [1160, 1000, 1000, 0, 0]

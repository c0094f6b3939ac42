"""The steps of the demo that need a bucket: ship, prune, lose the disk, restore, and fence the one who was replaced."""

from __future__ import annotations

import contextlib
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.cli.demo_steps import ROTATE_BYTES, TOPIC, Step
from tidelog.cli.output import human_bytes
from tidelog.cli.seaweed import SeaweedServer, weed_program
from tidelog.config import Settings
from tidelog.errors import FencedError, HeldError
from tidelog.log.settings import LogSettings
from tidelog.secret import Secret
from tidelog.tier.store_settings import StoreSettings
from tidelog.tier.tier_settings import TierSettings
from tidelog.topics.storage import LogDirectory
from tidelog.topics.topic import Topic
from tidelog.wiring import open_directory

_REPORT_EVERY = 1000
_KEPT_BYTES = 4 << 20

OnDone = Callable[[int], None]


class Bucket(NamedTuple):
    """Where the history goes, and how it is reached."""

    url: str
    settings: StoreSettings
    remark: str

    def plain_settings(self) -> dict[str, object]:
        """How it is reached, as keywords: for those who send it to other processes."""
        given = {name: value for name, value in msgspec.structs.asdict(self.settings).items() if value is not None}
        return {name: value.reveal() if isinstance(value, Secret) else value for name, value in given.items()}


class Content(NamedTuple):
    """All of a topic: how many messages, from which offset on, and the checksum of their values in order."""

    messages: int
    next_offset: int
    checksum: int
    is_contiguous: bool


@contextlib.contextmanager
def bucket(directory: Path) -> Iterator[Bucket]:
    """A bucket of a SeaweedFS that runs for as long as this lasts; without the program, a directory stands in."""
    if weed_program() is None:
        directory.mkdir(parents=True, exist_ok=True)
        remark = "weed is not installed (pip install 'tidelog[dev-s3]'), so a directory stands in for the bucket"
        yield Bucket(f"file://{directory.resolve()}", StoreSettings(), remark)
        return
    with SeaweedServer(directory) as server:
        yield Bucket(server.url, server.settings(), f"SeaweedFS answers at {server.endpoint}")


def open_node(root: Path, place: Bucket) -> LogDirectory:
    """A log directory with its history in the bucket, and only the newest few MiB of it on the disk."""
    settings = Settings(
        store=place.url,
        metadata="bucket",
        log=LogSettings(rotate_max_bytes=ROTATE_BYTES),
        tier=TierSettings(max_object_bytes=8 << 20, local_retention_bytes=_KEPT_BYTES),
        object_store=place.settings,
    )
    return open_directory(root, settings)


def ship_and_prune(root: Path, place: Bucket, on_done: OnDone) -> tuple[Step, Content]:
    """Ships a log that was local so far, lets its disk be pruned, and reads all of it again."""
    with open_node(root, place) as log:
        topic = log.topic(TOPIC)
        before = content_of(topic, lambda _: None)
        local_bytes = _local_bytes(topic)
        started = time.perf_counter()
        shipped = topic.ship()
        seconds = time.perf_counter() - started
        topic.prune()
        hot_start, left_bytes = topic.hot_start_offset, _local_bytes(topic)
        after = content_of(topic, on_done)
        objects = _objects(topic)
    step = Step(
        findings=[
            place.remark,
            f"shipped {shipped:,} messages as {objects} objects in {seconds:.2f} s",
            f"the disk has {human_bytes(left_bytes)} of {human_bytes(local_bytes)} left: offsets from {hot_start:,} on",
        ]
    )
    step.numbers = {"shipped": shipped, "objects": objects, "ship_seconds": seconds, "local_bytes_left": left_bytes}
    step.proofs["everything is in the bucket"] = shipped == before.next_offset
    step.proofs["the disk keeps no more than it was told to"] = left_bytes <= _KEPT_BYTES + ROTATE_BYTES
    step.proofs["reading goes on across bucket and disk, byte for byte"] = after == before and after.is_contiguous
    return step, before


def lose_and_restore(lost: Path, restored: Path, place: Bucket, before: Content, on_done: OnDone) -> Step:
    """Deletes the directory, and goes on from the bucket alone in another one."""
    shutil.rmtree(lost)
    started = time.perf_counter()
    with open_node(restored, place) as log:
        topic = log.topic(TOPIC)
        seconds = time.perf_counter() - started
        after = content_of(topic, on_done)
        offset = topic.append(b"the first message after the disk was lost", sync=True)
        topic.ship()
    step = Step(findings=[f"opened from the bucket alone in {seconds * 1000:.0f} ms; {after.messages:,} messages"])
    step.numbers = {"restored": after.messages, "restore_open_ms": seconds * 1000}
    step.proofs["nothing is missing after the loss of the disk"] = after == before
    step.proofs["the next message got the next offset"] = offset == before.next_offset
    return step


def fence(old_root: Path, new_root: Path, place: Bucket) -> Step:
    """Lets a second node take the topic over while the first still has it open, once that is meant."""
    with open_node(old_root, place) as old, open_node(new_root, place) as new:
        replaced, held = old.topic(TOPIC), _is_held(new)
        owner = new.topic(TOPIC, take_over=True)
        offset = owner.append(b"written by the new owner", sync=True)
        owner.ship()
        try:
            replaced.append(b"written by the one who was replaced")
            replaced.ship()
            refused = ""
        except FencedError as error:
            refused = str(error)
        last = next(iter(owner.read(offset)))
    step = Step(findings=[f"the first node was told: {refused.partition('.')[0]}" if refused else "nobody was told"])
    step.proofs["nobody takes a topic from a living node by accident"] = held
    step.proofs["the one who was replaced can change nothing any more"] = bool(refused)
    step.proofs["the new owner's messages are untouched"] = last.value == b"written by the new owner"
    return step


def _is_held(log: LogDirectory) -> bool:
    try:
        log.topic(TOPIC)
    except HeldError:
        return True
    return False


def content_of(topic: Topic, on_done: OnDone) -> Content:
    """Reads everything."""
    count, checksum, is_contiguous = 0, 0, True
    for message in topic.read():
        is_contiguous = is_contiguous and message.offset == count
        checksum = zlib.crc32(message.value, checksum)
        count += 1
        if count % _REPORT_EVERY == 0:
            on_done(count)
    return Content(count, topic.next_offset, checksum, is_contiguous)


def _local_bytes(topic: Topic) -> int:
    statistics = topic.statistics().log
    return 0 if statistics is None else statistics.file_bytes


def _objects(topic: Topic) -> int:
    tier = topic.statistics().tier
    return 0 if tier is None or tier.shipper is None else tier.shipper.objects_created

"""The job `ship`: brings what is on a disk to the store, many topics at a time, sent by Spark's workers.

The driver owns the directory and its topics while it runs; a claim cannot be shared, so the driver plans and publishes,
in the order of offsets, and workers read, check and send the bytes. Of a topic one object is under way at a time: what
lies in a store beyond the catalog's end and has something behind it is the sign of a lost catalog
(`tier/older_catalog.py`), and a killed job must not leave it. So the work is spread over topics.

Invariants
- Beside a live owner nothing is done: it ships by itself, and the error says so. Topics that another node owns, or that
  were sealed for their next owner, are left alone.
- An object is published after it was read back and its frames were found to be those of the files.
- Killed anywhere: what is published is published, the rest is on the disk. At most one object a topic is left over,
  which `gc` removes.
- One topic that fails does not keep the others from being shipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import msgspec

from tidelog.errors import ConflictError, InputError, LockedError, NotFoundError, NotSupportedError, TidelogError
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Problem, Progress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof, Tally, side_of, total
from tidelog.pipeline.jobs.ship_object import send_object, work_of
from tidelog.pipeline.open_topics import cold_place
from tidelog.pipeline.part import ColdPlace
from tidelog.pipeline.root import Root
from tidelog.pipeline.work import run_on_workers
from tidelog.tier.shipment import Shipment
from tidelog.tier.upload import Uploaded
from tidelog.topics.names import parse_topic_name
from tidelog.wiring import open_directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.tier.tiered_log import TieredLog
    from tidelog.topics.storage import LogDirectory

_TOPICS_AT_ONCE = 32
_LOOK_SECONDS = 0.2


class ShippedTopic(msgspec.Struct, frozen=True, kw_only=True):
    """How far a topic is in the store now, and what of that is new."""

    topic: str
    shipped_offset: int
    messages: int = 0
    objects: int = 0
    bytes: int = 0


class ShipReport(JobReport, frozen=True, kw_only=True):
    """Every topic that was this directory's to ship."""

    topics: tuple[ShippedTopic, ...] = ()


def ship(
    spark: SparkSession, root: Root, topics: Sequence[str] | None = None, on_progress: OnProgress = ignore_progress
) -> ShipReport:
    """Ships everything that is on the disk of these topics, of all by default."""
    began = time.monotonic()
    with _taken(root) as log:
        place = cold_place(root, log)
        if place is None:
            raise NotSupportedError("this log directory has no store", path=log.root, hint="Open it with one first")
        names, notes = _chosen(log, topics)
        shippings = [_Shipping(spark, place, log, name) for name in names]
        problems = _ship_all(shippings, on_progress)
        done = tuple(one.result() for one in shippings)
        proofs = tuple(one.proof() for one in shippings if one.went_in)
    return ShipReport(
        job="ship",
        topics=done,
        proofs=proofs,
        problems=tuple(problems),
        notes=tuple(notes),
        seconds=round(time.monotonic() - began, 3),
    )


def _taken(root: Root) -> LogDirectory:
    """The directory, owned by this process; nothing runs in it but this job."""
    if root.directory is None:
        raise InputError(
            "a store alone has nothing to ship", hint="Name the log directory whose files are to be shipped"
        )
    if not root.directory.is_dir():
        raise NotFoundError("there is no log directory", path=root.directory, hint="Check --root")
    try:
        return open_directory(root.directory, root.load(), runs_in_background=False, renews_lease=True)
    except LockedError as error:
        raise LockedError(
            "another process has this directory open, and ships it by itself",
            path=root.directory,
            hint="Let it, or stop it first",
        ) from error


# Which topics


def _chosen(log: LogDirectory, topics: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Those that are this directory's, and what is said about the others."""
    known = log.topics()
    for name in topics or ():
        if str(parse_topic_name(name)) not in known:
            raise NotFoundError(f"there is no topic {name}", path=log.root, hint="`tidelog topic list` shows them")
        if (why := _why_not_ours(log, name)) is not None:
            raise ConflictError(why, hint="Ship it where it is owned")
    if topics:
        return list(dict.fromkeys(topics)), []
    reasons = {name: _why_not_ours(log, name) for name in known if (log.root / name).is_dir()}
    ours = [name for name, why in reasons.items() if why is None]
    return ours, [f"left out: {why}" for why in reasons.values() if why is not None]


def _why_not_ours(log: LogDirectory, name: str) -> str | None:
    """Opening a topic claims it, and fences whoever owned it. That must not happen by accident."""
    assert log.tier is not None, "there is a store"
    parsed = parse_topic_name(name)
    catalog = log.tier.catalog(parsed.namespace, parsed.name)
    found, marker = catalog.owner(), catalog.sealed()
    if found is None:
        return None
    if marker is not None and marker.sealed and marker.epoch == found[0].epoch:
        return f"{name} is sealed, for whoever opens it next"
    return None if found[0].node == log.info.node else f"{found[0].node} owns {name}"


# Shipping them


class _Shipping:
    """One topic on its way. The shipper of the topic does everything as always, but for the sending."""

    def __init__(self, spark: SparkSession, place: ColdPlace, log: LogDirectory, name: str) -> None:
        self.name = name
        self.went_in: list[Tally] = []
        self.came_out: list[Tally] = []
        self.done_bytes = 0
        self._spark = spark
        self._place = place
        self._log = log
        self._objects = 0
        self._sent_bytes = 0
        self._messages = 0
        self._tiered: TieredLog | None = None

    def open(self) -> int:
        """Claims the topic; returns about how many bytes there are to ship. Live topics keep nothing to ship."""
        topic = self._log.topic(self.name)
        self._tiered = topic.tiered
        if self._tiered is None:
            return 0
        self._tiered.shipper.send = self._send
        return self._tiered.shipper.statistics().lag_bytes

    def run(self) -> None:
        if self._tiered is not None:
            before = self._tiered.shipped_offset
            try:
                self._tiered.ship()
            finally:
                self._messages = self._tiered.shipped_offset - before

    def _send(self, shipment: Shipment, key: str) -> Uploaded:
        assert self._tiered is not None, "an open topic ships"
        settings = self._tiered.settings
        log_id = self._tiered.owned.ownership.owner.log_id
        work = work_of(self.name, self._place, key, shipment, settings, log_id)
        (sent,) = run_on_workers(self._spark, send_object, [work])
        self.went_in.append(sent.went_in)
        self.came_out.append(sent.came_out)
        self.done_bytes += shipment.raw_bytes
        self._objects += 1
        self._sent_bytes += sent.info.size
        return sent.uploaded

    def proof(self) -> Proof:
        went_in, came_out = total(self.went_in), total(self.came_out)
        return Proof(subject=self.name, went_in=side_of(went_in), came_out=side_of(came_out))

    def result(self) -> ShippedTopic:
        return ShippedTopic(
            topic=self.name,
            shipped_offset=0 if self._tiered is None else self._tiered.shipped_offset,
            messages=self._messages,
            objects=self._objects,
            bytes=self._sent_bytes,
        )


def _ship_all(shippings: Sequence[_Shipping], on_progress: OnProgress) -> list[Problem]:
    problems: list[Problem] = []
    total_bytes, opened = 0, []
    for done, one in enumerate(shippings):
        on_progress(Progress("opening topics", done, len(shippings)))
        try:
            total_bytes += one.open()
            opened.append(one)
        except TidelogError as error:
            problems.append(Problem(topic=one.name, reason=str(error)))
    return [*problems, *_run_all(opened, total_bytes, on_progress)]


def _run_all(shippings: Sequence[_Shipping], total_bytes: int, on_progress: OnProgress) -> Iterator[Problem]:
    pool = ThreadPoolExecutor(_TOPICS_AT_ONCE, thread_name_prefix="tidelog-ship")
    try:
        names = {pool.submit(one.run): one.name for one in shippings}
        running: set[Future[None]] = set(names)
        while running:
            done, running = wait(running, _LOOK_SECONDS, FIRST_COMPLETED)
            on_progress(Progress("shipping", min(total_bytes, sum(one.done_bytes for one in shippings)), total_bytes))
            yield from _problems_of(done, names)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _problems_of(done: set[Future[None]], names: dict[Future[None], str]) -> Iterator[Problem]:
    for future in done:
        try:
            future.result()
        except TidelogError as error:
            yield Problem(topic=names[future], reason=str(error))

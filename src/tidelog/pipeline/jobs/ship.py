"""The job `ship`: ships the backlog of many topics from the local disk to the store, with uploads by Spark's workers.

The driver owns the directory and its topics while it runs; a claim cannot be shared, so the driver plans and publishes,
in the order of offsets, and workers read, check and upload the bytes; what is small the driver uploads itself. Each
topic has one upload in progress at a time: an object in a store beyond the catalog's end that has another one after it
is the sign of a lost catalog (`cold/stale_catalog.py`), and a killed job must not leave one. So the work is parallel
over topics.

Invariants
- The job does nothing beside a live owner: the owner ships by itself, and the error says so. Topics that another node
  owns, or that were sealed for their next owner, are left alone.
- An object is published after it was read back and its frames were found to be those of the files.
- After a kill at any point, published objects stay published and the rest is on the disk. At most one object per topic
  is left over, which `gc` removes.
- A topic that fails does not keep the others from being shipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.cold.settings import TierSettings
from tidelog.cold.upload import Uploaded, UploadPlan, describe_object, upload_of
from tidelog.errors import (
    ConflictError,
    DataError,
    InputError,
    LockedError,
    NotFoundError,
    NotSupportedError,
    TidelogError,
)
from tidelog.findings import Finding
from tidelog.log.binding import BoundFiles
from tidelog.log.frame import Frames
from tidelog.pipeline.address import Root
from tidelog.pipeline.ingest import opened_log
from tidelog.pipeline.jobs.job import (
    JobReport,
    OnProgress,
    Progress,
    Reconciliation,
    Totals,
    ignore_progress,
    logged,
    total,
)
from tidelog.pipeline.jobs.tally import chosen_logs, notes_on, tally_frames
from tidelog.pipeline.jobs.verify import ObjectWork, TopicObject, check_topic_object
from tidelog.pipeline.location import TopicLocation
from tidelog.pipeline.work import run_in_threads, run_on_workers
from tidelog.store.keys import parse_object_id
from tidelog.topics.directory import LogDirectory, why_not_ours
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import parse_topic_name
from tidelog.wiring import open_directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cold.tiered_log import TieredLog


# Executor task of `ship`: uploads the frames of one object from the files, and reads the object back.
#
# Invariants
# - Every frame is checked before it is uploaded (`cold/upload.py`), and again in what the store returns.
# - It publishes nothing: the object becomes part of the topic when the driver, which has the claim, publishes it.
# - A repeated task uploads the same object: its name and its bytes are determined by the files.


# Smaller objects are sent by the driver, one thread a topic: to start a task takes it longer than to send them.
_LEAST_TASK_BYTES = 16 << 20


class SendWork(msgspec.Struct, frozen=True, kw_only=True):
    """An object to send: which frames, and as what."""

    topic: str
    place: TopicLocation
    key: str
    shipment: UploadPlan
    settings: TierSettings
    log_id: str


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """An object that is in the store: what the driver has to know to publish it, and what went in and came out."""

    uploaded: Uploaded
    went_in: Totals
    came_out: Totals


def send_object(work: SendWork) -> Sent:
    """Runs on a worker, which must see the files under the same path."""
    gone = next((piece.path for piece in work.shipment.pieces if not piece.path.exists()), None)
    if gone is not None:
        raise InputError(
            f"a worker does not see {gone}",
            operation="ship",
            hint="The directory must be at the same path on every worker; one that is here alone: --master local[*]",
        )
    went_in = Totals()

    def count(frames: Frames) -> None:
        nonlocal went_in
        went_in += tally_frames(frames)

    upload = upload_of(BoundFiles(), work.shipment, work.log_id, work.settings, TIMESTAMP_FIELD)
    uploaded = upload.send(work.place.objects, work.key, count)
    return Sent(uploaded=uploaded, went_in=went_in, came_out=_read_back(work, uploaded).totals)


def _read_back(work: SendWork, uploaded: Uploaded) -> TopicObject:
    """Every frame of the object, and that it is as it is going to be described; DataError when it is not."""
    name = parse_object_id(work.key.rpartition("/")[2])
    assert name is not None, "the driver has named it"
    codec = work.settings.ship_compression
    descriptor = describe_object(name, work.shipment, uploaded, codec, work.log_id, uploaded.last_time_us)
    found = check_topic_object(ObjectWork(topic=work.topic, place=work.place, descriptor=descriptor))
    if found.is_gone or found.findings:
        what = "it is gone" if found.is_gone else str(found.findings[0])
        raise DataError(f"{work.key} differs from what was uploaded: {what}", operation="ship")
    return found


_TOPICS_AT_ONCE = 32


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


@logged
def ship(
    spark: SparkSession, root: Root, topics: Sequence[str] | None = None, on_progress: OnProgress = ignore_progress
) -> ShipReport:
    """Ships everything that is on the disk of these topics, of all by default."""
    with _taken(root) as log:
        place = root.place
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
        reconciliations=proofs,
        findings=tuple(problems),
        notes=tuple(notes),
    )


def _taken(root: Root) -> LogDirectory:
    """The directory, owned by this process; nothing runs in it but this job."""
    if root.directory is None:
        raise InputError(
            "a store has no local files to ship", hint="Name the log directory whose files are to be shipped"
        )
    if not root.directory.is_dir():
        raise NotFoundError("there is no log directory", path=root.directory, hint="Check --root")
    try:
        return open_directory(root.directory, root.load(), runs_in_background=False, renews_lease=True)
    except LockedError as error:
        raise LockedError(
            "another process has this directory open, and ships it by itself",
            path=root.directory,
            hint="Wait for it, or stop it first",
        ) from error


# Which topics


def _chosen(log: LogDirectory, topics: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Those that are this directory's, and what is said about the others."""
    known = chosen_logs(log, log.topics(), topics, str(log.root))
    for name in known if topics is not None else ():
        if (why := why_not_ours(log, name)) is not None:
            raise ConflictError(why, hint="Ship it where it is owned")
    if topics is not None:
        return known, [*notes_on(known, str(log.root))]
    reasons = {name: why_not_ours(log, name) for name in known if (log.root / name).is_dir()}
    ours = [name for name, why in reasons.items() if why is None]
    return ours, [f"left out: {why}" for why in reasons.values() if why is not None]


# Shipping them


class _Shipping:
    """One topic being shipped. The shipper of the topic does everything as always, except for the upload."""

    def __init__(self, spark: SparkSession, place: TopicLocation, log: LogDirectory, name: str) -> None:
        self.name = name
        self.went_in: list[Totals] = []
        self.came_out: list[Totals] = []
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
        topic = opened_log(self._log, parse_topic_name(self.name))
        self._tiered = topic._tiered
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

    def _send(self, shipment: UploadPlan, key: str) -> Uploaded:
        assert self._tiered is not None, "an open topic ships"
        settings = self._tiered.settings
        log_id = self._tiered.owned.ownership.owner.log_id
        work = SendWork(
            topic=self.name, place=self._place, key=key, shipment=shipment, settings=settings, log_id=log_id
        )
        is_small = shipment.raw_bytes < _LEAST_TASK_BYTES
        (sent,) = [send_object(work)] if is_small else run_on_workers(self._spark, send_object, [work])
        self.went_in.append(sent.went_in)
        self.came_out.append(sent.came_out)
        self.done_bytes += shipment.raw_bytes
        self._objects += 1
        self._sent_bytes += sent.uploaded.info.size
        return sent.uploaded

    def proof(self) -> Reconciliation:
        went_in, came_out = total(self.went_in), total(self.came_out)
        return Reconciliation(subject=self.name, went_in=went_in, came_out=came_out)

    def result(self) -> ShippedTopic:
        return ShippedTopic(
            topic=self.name,
            shipped_offset=0 if self._tiered is None else self._tiered.shipped_offset,
            messages=self._messages,
            objects=self._objects,
            bytes=self._sent_bytes,
        )


def _ship_all(shippings: Sequence[_Shipping], on_progress: OnProgress) -> list[Finding]:
    problems: list[Finding] = []
    total_bytes, opened = 0, []
    for done, one in enumerate(shippings):
        on_progress(Progress("opening topics", done, len(shippings)))
        try:
            total_bytes += one.open()
            opened.append(one)
        except TidelogError as error:
            problems.append(Finding(subject=one.name, message=str(error)))

    def tell() -> None:
        on_progress(Progress("shipping", min(total_bytes, sum(one.done_bytes for one in opened)), total_bytes))

    failed = run_in_threads(_Shipping.run, opened, _TOPICS_AT_ONCE, tell, waits=True)
    return [*problems, *(Finding(subject=one.name, message=str(error)) for one, error in failed)]

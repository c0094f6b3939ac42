"""What a worker does for `ship`: sends the frames of one object from the files, and reads the object back.

Invariants
- Every frame is checked before it is sent (`tier/upload.py`), and once more in what the store gives back.
- It publishes nothing: the object is part of the topic when the driver, which has the claim, has published it.
- Sent twice, because a task was started again, it is the same object: its name and its bytes follow from the files.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidelog.errors import DataError, InputError
from tidelog.log.bound_files import BoundFiles
from tidelog.log.scanner import FileScanner
from tidelog.pipeline.jobs.frame_tally import tally_frames
from tidelog.pipeline.jobs.proof import Tally
from tidelog.pipeline.jobs.verify_object import ObjectFinding, ObjectWork, check_object
from tidelog.pipeline.part import ColdPlace
from tidelog.pipeline.partition_reader import open_objects
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import parse_object_id
from tidelog.tier.object_store import ObjectInfo
from tidelog.tier.shipment import Piece, Shipment
from tidelog.tier.tier_settings import TierSettings
from tidelog.tier.upload import Uploaded, upload_of
from tidelog.topics.message import TIMESTAMP_FIELD

_READ_BYTES = 4 << 20


class FileRun(msgspec.Struct, frozen=True):
    """Frames in one file, as `tier/shipment.py` has them."""

    seq: int
    path: str
    byte: int
    end_byte: int
    first_offset: int
    next_offset: int


class SendWork(msgspec.Struct, frozen=True, kw_only=True):
    """An object to send: which frames, and as what."""

    topic: str
    place: ColdPlace
    key: str
    runs: tuple[FileRun, ...]
    settings: TierSettings
    log_id: str


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """An object that is in the store: what the driver has to know to publish it, and what went in and came out."""

    info: ObjectInfo
    checksum: str
    offset_index: tuple[tuple[int, int], ...]
    first_time_us: int | None
    last_time_us: int | None
    went_in: Tally
    came_out: Tally

    @property
    def uploaded(self) -> Uploaded:
        """As the shipper knows it."""
        return Uploaded(self.info, self.checksum, self.offset_index, self.first_time_us, self.last_time_us)


def work_of(
    topic: str, place: ColdPlace, key: str, shipment: Shipment, settings: TierSettings, log_id: str
) -> SendWork:
    """A shipment as it goes to a worker."""
    runs = tuple(
        FileRun(one.seq, str(one.path), one.byte, one.end_byte, one.first_offset, one.next_offset)
        for one in shipment.pieces
    )
    return SendWork(topic=topic, place=place, key=key, runs=runs, settings=settings, log_id=log_id)


def send_object(work: SendWork) -> Sent:
    """Runs on a worker, which must see the files under the same path."""
    gone = next((run.path for run in work.runs if not Path(run.path).exists()), None)
    if gone is not None:
        raise InputError(
            f"a worker does not see {gone}",
            operation="ship",
            hint="The directory must be at the same path on every worker; one that is here alone: --master local[*]",
        )
    shipment = Shipment(tuple(Piece(**{**msgspec.structs.asdict(run), "path": Path(run.path)}) for run in work.runs))
    went_in = _tally(shipment)
    uploaded = upload_of(BoundFiles(), shipment, work.log_id, work.settings, TIMESTAMP_FIELD).send(
        open_objects(work.place), work.key
    )
    found = _read_back(work, shipment, uploaded)
    return Sent(
        info=uploaded.info,
        checksum=uploaded.checksum,
        offset_index=uploaded.offset_index,
        first_time_us=uploaded.first_time_us,
        last_time_us=uploaded.last_time_us,
        went_in=went_in,
        came_out=found.tally,
    )


def _tally(shipment: Shipment) -> Tally:
    """The frames as they are in the files."""
    tally = Tally()
    for piece in shipment.pieces:
        file = BoundFiles().open(piece.path)
        try:
            scanner = FileScanner(file, piece.byte, piece.first_offset, _READ_BYTES)
            while scanner.position < piece.end_byte and (frames := scanner.read(piece.end_byte)) is not None:
                tally += tally_frames(frames)
        finally:
            file.close()
    return tally


def _read_back(work: SendWork, shipment: Shipment, uploaded: Uploaded) -> ObjectFinding:
    """Every frame of the object, and that it is as it is going to be described; DataError when it is not."""
    found = check_object(
        ObjectWork(topic=work.topic, place=work.place, descriptor=_descriptor(work, shipment, uploaded))
    )
    if found.is_gone or found.problems:
        what = "it is gone" if found.is_gone else str(found.problems[0])
        raise DataError(f"what was sent as {work.key} did not come back the same: {what}", operation="ship")
    return found


def _descriptor(work: SendWork, shipment: Shipment, uploaded: Uploaded) -> Descriptor:
    name = parse_object_id(work.key.rpartition("/")[2])
    assert name is not None, "the driver has named it"
    return Descriptor(
        object_id=str(name),
        start_offset=name.start,
        end_offset=name.end,
        first_time_us=uploaded.first_time_us,
        last_time_us=uploaded.last_time_us,
        reached_time_us=uploaded.last_time_us,
        size=uploaded.info.size,
        raw_size=shipment.raw_bytes,
        etag=uploaded.info.etag,
        checksum=uploaded.checksum,
        codec=work.settings.ship_compression,
        epoch=name.epoch,
        created_us=0,
        log_id=work.log_id,
        offset_index=uploaded.offset_index,
    )

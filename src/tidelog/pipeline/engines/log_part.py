"""A part of an engine's log for one task: which LSNs, what counts of them, and where the objects are.

Plain data, made by the driver and sent to a worker.
"""

from __future__ import annotations

import msgspec

from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.descriptor import Descriptor


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that begin at LSNs `start` to `stop` (exclusive), with seqs from `first_seq` to `last_seq`.

    The last of them may go on behind `stop`, but not to `end_lsn`: there the part of the log ends that the manifest
    tells of. `dead` are the ranges that were rolled back, packed.
    """

    place: EnginePlace
    start: int
    stop: int
    end_lsn: int
    first_seq: int
    last_seq: int
    dead: bytes = b""
    descriptors: tuple[Descriptor, ...] = ()

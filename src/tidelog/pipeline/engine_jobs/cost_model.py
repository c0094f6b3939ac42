"""What an engine costs in a store, as numbers: objects and bytes of each kind, requests, and what those cost.

    a restore           documents and the claim, the newest state, the log behind it with its descriptors
    a million reads     of values that are in the store alone, each by itself, nothing of them cached
    shipping            objects at the rate of those that are there, each with its descriptor, `cur` and the manifest

Invariants
- It is arithmetic over what was counted: nothing is read here.
- Requests are counted as the code makes them: ranges of 4 MiB, parts of 8 MiB, one request for up to 1000 listed keys.
  Listing counts as writing does, as on bills. Requests that fail, or that ask whether there is something, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tidelog.pipeline.engine_jobs.cost_prices import Prices

Kind = Literal["log", "packs", "data", "index", "states", "metadata", "garbage"]
KINDS: tuple[Kind, ...] = ("log", "packs", "data", "index", "states", "metadata", "garbage")

COLD_READS = 1_000_000
_RANGE_BYTES = 4 << 20
_UPLOAD_BYTES = 8 << 20
_LISTED_KEYS = 1000
# A month is not told from a few seconds, such as those in which somebody ships by hand.
_LEAST_RATE_US = 600 * 1_000_000
_MONTH_US = 30 * 86_400 * 1_000_000
# A state of one object: how large it is, its head, its end, its footer. A row file: its footer.
_STATE_REQUESTS = 4
_PART_REQUESTS = 1
# Looking around, proving that the store takes conditional writes, and claiming the engine: the same for all restores.
_RESTORE_GETS = 60
_RESTORE_PUTS = 25
# Once to say how much there is, once to read it.
_DESCRIPTOR_GETS = 2
# With each object: its descriptor and `cur`; with each time of shipping: the manifest, written and read back.
_PUTS_AN_OBJECT = 3
_GETS_AN_OBJECT = 2
_INDEX_BLOCK_BYTES = 16 << 10


class KindUse(msgspec.Struct, frozen=True, kw_only=True):
    """How many objects of a kind there are, and their bytes."""

    kind: Kind
    objects: int = 0
    bytes: int = 0


class LogObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object of the log, as far as it matters here."""

    size: int
    lsn: int
    next_lsn: int
    created_us: int
    is_shipped: bool
    is_compressed: bool


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """An engine in a store, or as it would be there: what a price can be put on."""

    uses: tuple[KindUse, ...]
    log: tuple[LogObject, ...]
    state_bytes: int = 0
    state_parts: tuple[int, ...] = ()
    state_lsn: int = 1
    values_in_log: int = 0
    values_compacted: int = 0
    value_bytes: int = 0

    @property
    def objects(self) -> int:
        return sum(one.objects for one in self.uses)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.uses)


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, the bytes that they fetch, and their price. `objects` are those that are fetched."""

    puts: int = 0
    gets: int = 0
    bytes: int = 0
    objects: int = 0
    price: float = 0.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine costs as it is, or would be."""

    name: str
    is_estimated: bool
    objects: int
    bytes: int
    storage_month: float
    restore: Requests
    cold_reads: Requests
    shipping_month: Requests | None


def scenario(name: str, holding: Holding, prices: Prices, *, is_estimated: bool) -> Scenario:
    """The price of all of it."""
    return Scenario(
        name=name,
        is_estimated=is_estimated,
        objects=holding.objects,
        bytes=holding.bytes,
        storage_month=prices.for_month(holding.bytes),
        restore=priced(restore_requests(holding), prices),
        cold_reads=priced(cold_read_requests(holding), prices),
        shipping_month=_shipping(holding.log, prices),
    )


def priced(requests: Requests, prices: Prices) -> Requests:
    """The same with its price."""
    price = prices.for_requests(requests.puts, requests.gets, requests.bytes)
    return msgspec.structs.replace(requests, price=price)


def restore_requests(holding: Holding) -> Requests:
    """From the newest state, and the objects of the log behind it."""
    tail = [one for one in holding.log if one.next_lsn > holding.state_lsn]
    gets = _RESTORE_GETS + _DESCRIPTOR_GETS * len(tail) + sum(ranges(one.size) for one in tail)
    fetched = sum(one.size for one in tail)
    objects = len(tail)
    if holding.state_bytes or holding.state_parts:
        own = 0 if holding.state_parts else ranges(holding.state_bytes)
        gets += _STATE_REQUESTS + own + sum(_PART_REQUESTS + ranges(size) for size in holding.state_parts)
        fetched += holding.state_bytes + sum(holding.state_parts)
        objects += 1 + len(holding.state_parts)
    puts = _RESTORE_PUTS + -(-len(tail) // _LISTED_KEYS)
    return Requests(puts=puts, gets=gets, bytes=fetched, objects=objects)


def ranges(size: int) -> int:
    """How many requests fetch so many bytes."""
    return -(-size // _RANGE_BYTES)


def cold_read_requests(holding: Holding) -> Requests:
    """A million of them, spread evenly over all values: one request in the log, two in compacted data."""
    values = holding.values_in_log + holding.values_compacted
    if not values:
        return Requests()
    compacted = COLD_READS * holding.values_compacted // values
    average = holding.value_bytes / values
    in_log = COLD_READS - compacted
    # An object that is compressed is read in blocks of about a mebibyte.
    is_compressed = bool(holding.log) and all(one.is_compressed for one in holding.log)
    log_bytes = in_log * max(average, 1 << 20) if is_compressed else in_log * average
    fetched = log_bytes + compacted * (average + _INDEX_BLOCK_BYTES)
    return Requests(gets=in_log + 2 * compacted, bytes=round(fetched), objects=COLD_READS)


def _shipping(log: Sequence[LogObject], prices: Prices) -> Requests | None:
    """At the rate of the objects that were shipped and are still there; None while there is too little to tell."""
    shipped = [one for one in log if one.is_shipped]
    if len(shipped) < 2:
        return None
    lasted_us = shipped[-1].created_us - shipped[0].created_us
    if lasted_us < _LEAST_RATE_US:
        return None
    share = _MONTH_US / lasted_us
    puts = sum(_PUTS_AN_OBJECT + uploads(one.size) for one in shipped[1:])
    gets = _GETS_AN_OBJECT * (len(shipped) - 1)
    sent = sum(one.size for one in shipped[1:])
    found = Requests(
        puts=round(puts * share),
        gets=round(gets * share),
        bytes=round(sent * share),
        objects=round((len(shipped) - 1) * share),
    )
    # What is sent to a store costs its requests alone: nothing leaves it.
    return msgspec.structs.replace(found, price=prices.for_requests(found.puts, found.gets, 0))


def uploads(size: int) -> int:
    """How many requests write an object: one, or one a part with one before and one behind."""
    return 1 if size <= _UPLOAD_BYTES else -(-size // _UPLOAD_BYTES) + 2

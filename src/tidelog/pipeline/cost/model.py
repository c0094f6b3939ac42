"""The cost model of an engine's store: objects and bytes of each kind, requests, and their prices.

    a restore           documents and the claim, the newest state, the log after it with its descriptors
    a million reads     of values that are in the store alone, each by itself, nothing of them cached
    shipping            objects at the rate of those that are there, each with its descriptor, `cur` and the manifest

Invariants
- It is arithmetic over counts: nothing is read here.
- Requests are counted as the code makes them: ranges of 4 MiB, parts of 8 MiB, one request for up to 1000 listed keys.
  Listing is billed as writing. Failed requests, and those that only test for existence, do not count.
"""

# ruff: noqa: ERA001 (comments draw formats and formulas)
from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tidelog.errors import ConfigError
from tidelog.store.urls import canonical_url

# Prices of stores: what a gigabyte, a request and a transfer cost, given by the user.
#
#     storage = 0.023                      # a gigabyte for a month
#     put = 0.005                          # a thousand requests that write or list
#     get = 0.0004                         # a thousand requests that read
#     transfer = 0.0                       # a gigabyte that leaves the store
#
#     [stores."s3://backup/prefix"]        # another price for one of the stores; what is not said stays as above
#     storage = 0.0125
#
# Invariants
# - A gigabyte has 1,000,000,000 bytes, as on bills. There is no currency in here: results are in that of the prices.
# - What is in a file and is no price is refused by name.


GIGABYTE = 1_000_000_000
_REQUESTS = 1000


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store costs."""

    storage: float = 0.023
    put: float = 0.005
    get: float = 0.0004
    transfer: float = 0.0

    def for_month(self, stored_bytes: int) -> float:
        return stored_bytes / GIGABYTE * self.storage

    def for_requests(self, puts: float, gets: float, sent_bytes: float) -> float:
        """Asking, and being answered."""
        return (puts * self.put + gets * self.get) / _REQUESTS + sent_bytes / GIGABYTE * self.transfer


class PriceList(msgspec.Struct, frozen=True):
    """Prices by store; `default` for all others."""

    default: Prices = Prices()
    stores: dict[str, Prices] = {}

    def of(self, url: str) -> Prices:
        return self.stores.get(canonical_url(url), self.default)


def read_prices(path: Path, default: Prices | None = None) -> PriceList:
    """A list from a file of TOML; what it does not say is as in `default`."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("the file of prices does not exist", path=path, hint="Check the path") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"prices cannot be read: {error}", path=path) from error
    stores = document.pop("stores", {})
    base = _changed(default or Prices(), document, path)
    if not isinstance(stores, dict) or not all(isinstance(one, dict) for one in stores.values()):
        raise ConfigError("stores is not a table of tables", path=path, hint='Write [stores."s3://bucket/prefix"]')
    return PriceList(base, {canonical_url(url): _changed(base, one, path) for url, one in stores.items()})


def _changed(prices: Prices, changes: dict[str, object], path: Path) -> Prices:
    try:
        found = msgspec.convert({**msgspec.structs.asdict(prices), **changes}, Prices)
    except msgspec.ValidationError as error:
        hint = f"The prices are {', '.join(Prices.__struct_fields__)}, each a number"
        raise ConfigError(f"not a list of prices: {error}", path=path, hint=hint) from error
    return checked_prices(found)


def checked_prices(prices: Prices) -> Prices:
    """The same; ConfigError when one is negative."""
    for name in Prices.__struct_fields__:
        if not getattr(prices, name) >= 0:
            raise ConfigError(f"the price {name} is {getattr(prices, name)}", hint="A price is 0 or more")
    return prices


Kind = Literal["log", "blob_files", "data", "index", "states", "metadata", "garbage"]
KINDS: tuple[Kind, ...] = ("log", "blob_files", "data", "index", "states", "metadata", "garbage")

COLD_READS = 1_000_000
_RANGE_BYTES = 4 << 20
_UPLOAD_BYTES = 8 << 20
_LISTED_KEYS = 1000
# A month is not estimated from a few seconds, such as those of one manual ship.
_LEAST_RATE_US = 600 * 1_000_000
_MONTH_US = 30 * 86_400 * 1_000_000
# A state of one object: how large it is, its head, its end, its footer. A row file: its footer.
_STATE_REQUESTS = 1
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
    """From the newest snapshot, and the objects of the log after it."""
    tail = [one for one in holding.log if one.next_lsn > holding.state_lsn]
    gets = _RESTORE_GETS + _DESCRIPTOR_GETS * len(tail) + sum(ranges(one.size) for one in tail)
    fetched = sum(one.size for one in tail)
    objects = len(tail)
    if holding.state_bytes or holding.state_parts:
        gets += _STATE_REQUESTS + sum(_PART_REQUESTS + ranges(size) for size in holding.state_parts)
        fetched += holding.state_bytes + sum(holding.state_parts)
        objects += 1 + len(holding.state_parts)
    puts = _RESTORE_PUTS + -(-len(tail) // _LISTED_KEYS)
    return Requests(puts=puts, gets=gets, bytes=fetched, objects=objects)


def ranges(size: int) -> int:
    """How many requests fetch this many bytes."""
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
    """How many requests write an object: one, or one per part with one before and one after."""
    return 1 if size <= _UPLOAD_BYTES else -(-size // _UPLOAD_BYTES) + 2

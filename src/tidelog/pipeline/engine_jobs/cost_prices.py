"""Prices of stores: what a gigabyte, a request and a transfer cost, given by whoever asks.

    storage = 0.023                      # a gigabyte for a month
    put = 0.005                          # a thousand requests that write or list
    get = 0.0004                         # a thousand requests that read
    transfer = 0.0                       # a gigabyte that leaves the store

    [stores."s3://backup/prefix"]        # another price for one of the stores; what is not said stays as above
    storage = 0.0125

Invariants
- A gigabyte has 1,000,000,000 bytes, as on bills. There is no currency in here: results are in that of the prices.
- What is in a file and is no price is refused by name.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from tidelog.errors import ConfigError
from tidelog.tier.stores import canonical_url

GIGABYTE = 1_000_000_000
_REQUESTS = 1000


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store costs."""

    storage: float = 0.023
    put: float = 0.005
    get: float = 0.0004
    transfer: float = 0.0

    def for_month(self, stored_bytes: int) -> float:
        """Keeping so many bytes."""
        return stored_bytes / GIGABYTE * self.storage

    def for_requests(self, puts: float, gets: float, sent_bytes: float) -> float:
        """Asking, and being answered."""
        return (puts * self.put + gets * self.get) / _REQUESTS + sent_bytes / GIGABYTE * self.transfer


class PriceList(msgspec.Struct, frozen=True):
    """Prices by store; `default` for all others."""

    default: Prices = Prices()
    stores: dict[str, Prices] = {}

    def of(self, url: str) -> Prices:
        """Those of one store."""
        return self.stores.get(canonical_url(url), self.default)


def read_prices(path: Path, default: Prices | None = None) -> PriceList:
    """A list from a file of TOML; what it does not say is as in `default`."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("there is no file of prices", path=path, hint="Check the path") from error
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

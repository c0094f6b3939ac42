"""How safe an append is when it returns: accepted, synced to this disk, or shipped to the object store.

sync=False       it has its offset; the writer has it
sync=True        this disk has it
sync="shipped"   the object store has it too: the loss of this disk does not cost it
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Literal, NoReturn

from tidelog.errors import InputError, NotSupportedError, StoreUnavailableError, offsets_text
from tidelog.tier.tiered_log import TieredLog

Sync = bool | Literal["shipped"]
SHIPPED: Literal["shipped"] = "shipped"


def check_sync(sync: object, tiered: TieredLog | None) -> None:
    """Refuses a value that means nothing, and "shipped" without a store. Nothing is appended then."""
    if not sync or sync is True:
        return
    if sync != SHIPPED:
        raise InputError(f'sync must be True, False or "shipped", not {sync!r}', operation="append")
    if tiered is None:
        raise NotSupportedError(
            'sync="shipped" needs an object store, and this topic has none',
            operation="append",
            hint='Name one: tidelog.open("./data", store="s3://bucket/prefix")',
        )


def wait_shipped(tiered: TieredLog, first: int, last: int, timeout_seconds: float | None) -> None:
    """Returns once the accepted messages `first` to `last` are in the store; all who wait together share one object."""
    try:
        tiered.wait_shipped(last).result(timeout_seconds)
    except concurrent.futures.TimeoutError:
        _refuse(first, last, f"it took longer than {timeout_seconds} s")
    except StoreUnavailableError as error:
        _refuse(first, last, error.message, error)


async def wait_shipped_async(tiered: TieredLog, first: int, last: int, timeout_seconds: float | None) -> None:
    """As `wait_shipped`, suspending the task."""
    try:
        await asyncio.wait_for(asyncio.wrap_future(tiered.wait_shipped(last)), timeout_seconds)
    except TimeoutError:
        _refuse(first, last, f"it took longer than {timeout_seconds} s")
    except StoreUnavailableError as error:
        _refuse(first, last, error.message, error)


def _refuse(first: int, last: int, reason: str, cause: Exception | None = None) -> NoReturn:
    raise StoreUnavailableError(
        f"{offsets_text(first, last)} on this disk, but not in the store yet: {reason}",
        operation="append",
        hint="Do not append again: what is on the disk is shipped as soon as the store answers",
    ) from cause

"""What a worker does for `cost`: lists one place of an engine in a store. Fit for executors."""

from __future__ import annotations

import msgspec

from tidelog.pipeline.engine_jobs.cost_model import Kind
from tidelog.pipeline.engines.store_place import EnginePlace


class ListingWork(msgspec.Struct, frozen=True, kw_only=True):
    """A place to list. With `names` every object comes back, else their number and their bytes."""

    place: EnginePlace
    prefix: str
    kind: Kind
    names: bool = True


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What is there."""

    kind: Kind
    objects: int
    bytes: int
    names: dict[str, int] = {}


def list_place(work: ListingWork) -> Listing:
    """Lists one place."""
    objects, size, names = 0, 0, dict[str, int]()
    for info in work.place.opened().objects.list(work.prefix):
        objects += 1
        size += info.size
        if work.names:
            names[info.key] = info.size
    return Listing(kind=work.kind, objects=objects, bytes=size, names=names)

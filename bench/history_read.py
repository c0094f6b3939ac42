"""Reading history from a local SeaweedFS: against a plain download with a scan, in bounded memory, from a long catalog.

Sequential: one object from its first message to its last, through a history reader and through obstore's `get_range`
with the same ranges, as many at once, followed by the kernel's scan. Memory: what the resident memory of a process that
does nothing else grows by meanwhile. Range: what is fetched for a thousand messages in the middle. Catalog: what it
costs to open a reader in the middle of a topic of 2,000 objects, with a new catalog each time, compared with one of 20
(the object's own bytes not counted).

Needs `tidelog[test]` for the servers.

python bench/history_read.py [--megabytes 1024] [--rounds 5] [--catalog 2000] [--dir .] [--json]
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
from cold_object import KEYS, catalog_of, descriptor_of, plain_ranges, plain_scan, put_large_object
from measuring import Figure, at_least, at_most, parser_for, report, scratch_directory
from obstore.store import S3Store
from store_server import store_server

from tidelog.cold.catalog import Catalog, Current, Descriptor, encode_descriptor, with_start
from tidelog.cold.fetch import FetchSettings
from tidelog.cold.reader import History
from tidelog.log.binding import BINDING_BYTES
from tidelog.store.keys import ObjectId, TopicKeys, padded
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.servers import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, EtcdServer

PREFIX = "bench"
PAYLOAD_BYTES = 1024
MEGABYTE = 1 << 20
SETTINGS = FetchSettings()
SHORT = 20
MESSAGES_PER_OBJECT = 1000
MIDDLE_MESSAGES = 1000
OPENINGS = 15
Result = TypeVar("Result")


@contextmanager
def history_of(objects: ObjectStore, catalog: Catalog) -> Iterator[History]:
    """With as many threads as it fetches ranges at once."""
    with ThreadPoolExecutor(SETTINGS.read_ahead_ranges + 1) as threads:
        yield History(catalog, objects, threads, settings=SETTINGS)


def read_seconds(url: str, store: StoreSettings, descriptor: Descriptor) -> float:
    """Seconds for all messages of an object, through a history reader."""
    objects = open_store(url, store)
    with history_of(objects, catalog_of(descriptor)) as history:
        begin, read = time.perf_counter(), 0
        reader = history.read(0, descriptor.next_offset)
        while (batch := reader.next_batch()) is not None:
            read += batch.stop - batch.start
        seconds = time.perf_counter() - begin
    assert read == descriptor.count
    return seconds


def plain_seconds(endpoint: str, url: str, descriptor: Descriptor) -> float:
    """Seconds for the same bytes and the same scan with nothing around it."""
    client = S3Store(
        BUCKET,
        config={"endpoint": endpoint, "region": "us-east-1"},
        access_key_id=ACCESS_KEY_ID,
        secret_access_key=SECRET_ACCESS_KEY,
        client_options={"allow_http": True},
    )
    path = f"{url.removeprefix(f's3://{BUCKET}/')}/{KEYS.object(descriptor.name)}"
    begin = time.perf_counter()
    at_once = SETTINGS.read_ahead_ranges + 1
    read = plain_scan(plain_ranges(client, path, descriptor.size, SETTINGS.range_bytes, at_once))
    seconds = time.perf_counter() - begin
    assert read == descriptor.count
    return seconds


def grown_bytes(url: str, store: StoreSettings, descriptor: Descriptor) -> int:
    """By how much the resident memory of this process was larger at most than before it read an object."""
    before = resident_bytes()
    read_seconds(url, store, descriptor)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def fetched_bytes(url: str, store: StoreSettings, descriptor: Descriptor) -> int:
    """What is fetched for a thousand messages in the middle of an object."""
    with history_of(open_store(url, store), catalog_of(descriptor)) as history:
        first = descriptor.count // 2 + MIDDLE_MESSAGES // 2  # not where an entry of the index is
        reader, read = history.read(first, first + MIDDLE_MESSAGES), 0
        while (batch := reader.next_batch()) is not None:
            read += batch.stop - batch.start
        assert read == MIDDLE_MESSAGES
        return history.counters.snapshot().fetched_bytes


def resident_bytes() -> int:
    """What this process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_new_process(function: Callable[..., Result], *arguments: object) -> Result:
    """So that one measurement does not live in the memory of another."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def fill_catalog(metadata: MetadataStore, count: int) -> TopicKeys:
    """A topic of so many objects, as far as the catalog knows."""
    keys = TopicKeys("bench", f"catalog-{count}")
    index = tuple((offset, BINDING_BYTES + offset * PAYLOAD_BYTES) for offset in range(0, MESSAGES_PER_OBJECT, 100))

    def put(number: int) -> None:
        start = number * MESSAGES_PER_OBJECT
        name = ObjectId(start, start + MESSAGES_PER_OBJECT - 1, 1)
        shifted = tuple((start + offset, position) for offset, position in index)
        descriptor = descriptor_of(name, MESSAGES_PER_OBJECT * PAYLOAD_BYTES, shifted)
        metadata.put(keys.descriptor(start), encode_descriptor(descriptor))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(put, range(count)))
    move_current(Catalog(metadata, keys), count)
    return keys


def move_current(catalog: Catalog, count: int) -> None:
    """What `cur` is after so many publications, one after the other."""
    starts: list[int] = []
    for number in range(count):
        starts = with_start(starts, number * MESSAGES_PER_OBJECT)
    current = Current(padded(starts[-1]), [] if catalog.metadata.floor_is_cheap else starts)
    catalog.metadata.put(catalog.keys.current, msgspec.json.encode(current))


def opening_seconds(metadata: MetadataStore, keys: TopicKeys, count: int) -> float:
    """Seconds to find the object in the middle, by somebody who has just come."""
    offset, seconds = count * MESSAGES_PER_OBJECT // 2, []
    for _ in range(OPENINGS):
        begin = time.perf_counter()
        found = next(Catalog(metadata, keys).walk(offset))
        seconds.append(time.perf_counter() - begin)
        assert found.start_offset == offset
    return median(seconds)


def opening_figure(name: str, metadata: MetadataStore, long: int) -> Figure:
    """Many objects against few."""
    few, many = (opening_seconds(metadata, fill_catalog(metadata, count), count) for count in (SHORT, long))
    ours, peer = f"{many * 1000:.2f} ms", f"with {SHORT} {few * 1000:.2f} ms"
    return at_most(f"open a reader in {long} objects, {name}", ours, peer, many / few, 3)


def opening_figures(scratch: Path, objects: ObjectStore, long: int) -> list[Figure]:
    """For every kind of metadata store."""
    etcd = EtcdServer(made(scratch / "etcd"))
    etcd.begin()
    try:
        urls = {"sqlite": f"sqlite:///{scratch / 'metadata.db'}", "etcd": etcd.url, "bucket": "bucket"}
        figures = []
        for name, url in urls.items():
            with open_metadata_store(url, objects) as metadata:
                figures.append(opening_figure(name, metadata, long))
        return figures
    finally:
        etcd.kill()


def made(directory: Path) -> Path:
    """The directory, which is there now."""
    directory.mkdir()
    return directory


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the object in MiB (1024)")
    parser.add_argument("--rounds", type=int, default=5, help="how often; the median counts (5)")
    parser.add_argument("--catalog", type=int, default=2000, help="objects of the long catalog (2000)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory(arguments.dir))
        server = stack.enter_context(store_server(scratch))
        url, store = server.url(PREFIX), server.settings()
        objects = open_store(url, store)
        descriptor = put_large_object(objects, arguments.megabytes * MEGABYTE // (PAYLOAD_BYTES + 16), PAYLOAD_BYTES)
        rounds = []
        for _ in range(arguments.rounds):
            plain = in_new_process(plain_seconds, server.endpoint, url, descriptor)
            rounds.append((plain, in_new_process(read_seconds, url, store, descriptor)))
        growth = in_new_process(grown_bytes, url, store, descriptor) / MEGABYTE
        fetched = fetched_bytes(url, store, descriptor) / MEGABYTE
        openings = opening_figures(scratch, objects, arguments.catalog)
    plain, read = (median(column) for column in zip(*rounds, strict=True))
    plain_speed, speed = (descriptor.size / seconds / 1e6 for seconds in (plain, read))
    size_text = f"{descriptor.size / MEGABYTE:.0f} MiB"
    figures = [
        at_least(
            f"read history, {size_text}",
            f"{speed:.0f} MB/s",
            f"plain download and scan {plain_speed:.0f} MB/s",
            speed / plain_speed,
            0.7,
            durability="in the store",
            rounds=tuple([descriptor.size / one[side] / 1e6 for one in rounds] for side in (1, 0)),  # type: ignore[arg-type]
        ),
        at_most(f"memory while reading {size_text}", f"{growth:.0f} MiB more", "", growth, 96, " MiB"),
        at_most(
            f"fetched for {MIDDLE_MESSAGES} messages in the middle",
            f"{fetched:.1f} MiB",
            f"they are {MIDDLE_MESSAGES * (PAYLOAD_BYTES + 16) / MEGABYTE:.1f} MiB",
            fetched,
            16,
            " MiB",
        ),
        *openings,
    ]
    details = {
        "bytes": descriptor.size,
        "rounds_plain_and_read_s": rounds,
        "growth_mib": growth,
        "fetched_mib": fetched,
    }
    report("history_read", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
